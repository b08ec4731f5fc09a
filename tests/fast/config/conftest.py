"""Shared fixtures of refusals: the command line, run in an empty directory."""

import pytest


@pytest.fixture
def run(tmp_path, asked, latest, capsys, monkeypatch):
    """(exit code, lines on stderr, what was written) of the command line, in an empty directory."""
    from miles_dmd.run import main

    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)

    def ask(*flags, whole=True):
        before = set(tmp_path.rglob("*"))
        code = main(latest([*asked, *flags]) if whole else list(flags))
        err = capsys.readouterr().err
        assert err.removesuffix("\n").isprintable()
        return code, err.splitlines(), sorted(set(tmp_path.rglob("*")) - before)

    return ask
