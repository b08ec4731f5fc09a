"""Commands of other programs that the pages show mean what they are meant to."""

import re
import shlex
import sys
import warnings
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLACES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/*.md"), *ROOT.glob("miles_dmd/**/*.py")]
DOWNLOAD = {".md": re.compile(r"hf download [^`\n]*"), ".py": re.compile(r"hf download [^`\n\";]*")}


def downloads():
    for path in PLACES:
        for command in dict.fromkeys(DOWNLOAD[path.suffix].findall(path.read_text(encoding="utf-8"))):
            yield pytest.param(command.strip(), id=f"{path.relative_to(ROOT).as_posix()}: {command[12:60]}")


@pytest.fixture
def asked(monkeypatch):
    """``asked(words)``: what the Hub's own program would download."""
    from huggingface_hub.cli import download, hf

    calls = []
    monkeypatch.setattr(download, "snapshot_download", lambda **call: calls.append(call) or "")
    monkeypatch.setattr(download, "hf_hub_download", lambda **call: calls.append(call) or "")

    def parse(words):
        monkeypatch.setattr(sys, "argv", words)
        with warnings.catch_warnings(action="error"), pytest.raises(SystemExit) as ended:
            hf.app()  # warns: "Ignoring `--exclude` since filenames have been explicitly set"
        assert ended.value.code == 0
        (call,) = calls
        return call

    return parse


@pytest.mark.parametrize("command", list(downloads()))
def test_a_download_takes_a_repository_and_leaves_out_what_it_says(asked, command):
    words = shlex.split(re.sub(r"\{\w+\}|<[\w ]+>", "somewhere", command))

    call = asked(words)

    assert "filename" not in call
    assert call["allow_patterns"] == (following(words, "--include") or None)
    assert call["ignore_patterns"] == (following(words, "--exclude") or None)
    assert len(words) == 3 + 2 * sum(word.startswith("--") for word in words)  # a pattern without a flag is a file name


def following(words, flag):
    return [value for name, value in pairwise(words) if name == flag]


def test_there_are_downloads_to_test():
    assert len(list(downloads())) >= 4


def test_several_patterns_behind_one_flag_are_seen(asked):
    with pytest.raises(UserWarning, match="Ignoring `--exclude`"):
        asked(shlex.split("hf download owner/name --exclude a b"))
