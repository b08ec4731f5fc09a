"""``miles-dmd checkpoint inspect DIR`` prints a manifest, and says in one line why there is none to print."""

import subprocess
import sys

import pytest

from miles_dmd.__main__ import main


def test_manifest_is_printed(saved, capsys):
    status = main(["checkpoint", "inspect", str(saved.parent.parent), "--verify"])

    shown = capsys.readouterr().out
    assert status == 0
    for part in (
        str(saved), "dmd2", "fingerprint", "cycles           2", "optimizer steps  fake_score 4, student 1",
        "policy version   1", "critic 1, actor 1", "torch 2", "actor/shard-0.safetensors", "bytes in 12 files",
        "whole: every file has its checksum",
    ):  # fmt: skip
        assert part in shown, part


def test_others_beside_it_are_named(make_run, capsys):
    run = make_run()
    for cycle in (1, 2):
        run.saver.save(run.after(cycle))

    main(["checkpoint", "inspect", str(run.directory)])

    shown = capsys.readouterr().out
    assert "beside it: cycle_000001" in shown
    assert "--verify computes the checksums" in shown


@pytest.mark.parametrize("verify", [(), ("--verify",)])
def test_damage_is_told_in_one_line(saved, capsys, verify):
    shard = saved / "actor" / "shard-0.safetensors"
    shard.write_bytes(bytes(len(shard.read_bytes())) if verify else b"")

    status = main(["checkpoint", "inspect", str(saved), *verify])

    error = capsys.readouterr().err
    assert (status, error.count("\n")) == (2, 1)
    assert error.startswith("miles-dmd: error: ")
    assert "actor/shard-0.safetensors" in error


def test_it_needs_neither_torch_nor_ray(saved):
    code = (
        "import sys; from miles_dmd.__main__ import main; main(sys.argv[1:]); "
        "print({'torch', 'ray', 'numpy', 'yaml'} & set(sys.modules))"
    )
    words = ["checkpoint", "inspect", str(saved)]

    shown = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True).stdout

    assert shown.splitlines()[-1] == "set()"


def test_package_can_be_run():
    done = subprocess.run([sys.executable, "-m", "miles_dmd", "--version"], capture_output=True, text=True, check=True)

    assert done.stdout.strip()


def test_what_a_terminal_would_obey_is_shown(saved, rewrite, capsys):
    rewrite(saved, lambda content: content.update(created="\x1b]0;title\x07\x1b[2J", loss_type="\u202egninrael"))

    assert main(["checkpoint", "inspect", str(saved)]) == 0

    shown = capsys.readouterr().out
    assert r"\x1b]0;title\x07\x1b[2J" in shown
    assert all(character.isprintable() for line in shown.splitlines() for character in line)


@pytest.mark.parametrize("text", ["\ud800", "\0"])
def test_half_a_surrogate_pair_is_told_in_one_line(saved, rewrite, capsys, text):
    rewrite(saved, lambda content: content.update(created=text))

    assert main(["checkpoint", "inspect", str(saved)]) == 2

    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "manifest.json is damaged" in error
