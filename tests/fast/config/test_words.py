"""Words of refusals at the door: each names the flag, what was written, and the cure."""

import logging
import os

import pytest

from miles_dmd.__main__ import main
from miles_dmd.config.cli import parse_args

WORDS = [
    ("--alarm-saturation 2", "--alarm-saturation 2 is a share"),
    ("--save /proc/x", "--save /proc/x: /proc is the kernel's own"),
    ("--cache-dir /proc/y", "--cache-dir /proc/y: /proc is the kernel's own"),
    ("--teacher-guidance 1e38", "--teacher-guidance 1e+38 must be a finite number, at most 1,000,000,000"),
    ("--teacher-guidance 0.5", "--teacher-guidance 0.5 must be a finite number, at least 1"),
    ("--lr 1e400", "--lr '1e400' is beyond what a float can hold"),
    (f"--seed {'9' * 5000}", " has 5,000 digits, and must be a whole number, "),
]


@pytest.mark.parametrize(("flags", "words"), WORDS, ids=range(len(WORDS)))
def test_refusal_names_flag_and_value_as_written(refused, flags, words):
    assert words in refused(*flags.split())


PRESETS = [
    ("args:\n", "the file asks for nothing"),
    ("args: {lr: !float2 1}\n", "tags (!name) are not read"),
    ("args: {lr: 1.0e-5}\n---\nargs: {seed: 1}\n", "a preset is one document"),
    ("args:\n\tlr: 1.0e-5\n", "indent with spaces"),
]


@pytest.mark.parametrize(("text", "words"), PRESETS, ids=range(len(PRESETS)))
def test_preset_that_cannot_be_read_is_told_with_a_cure(refused, tmp_path, text, words):
    (tmp_path / "own.yaml").write_text(text)

    message = refused("--config", str(tmp_path / "own.yaml"))

    assert words in message
    assert "own.yaml" in message


def test_value_of_a_preset_that_a_flag_switches_off_is_logged(asked, tmp_path, caplog):
    (tmp_path / "own.yaml").write_text("args: {placement_timeout: 5}\n")

    with caplog.at_level(logging.INFO, "miles_dmd"):
        parse_args([*asked, "--config", str(tmp_path / "own.yaml"), "--local"])

    assert "switch off what the preset asks for: placement-timeout" in caplog.text


def test_memory_that_runs_out_at_the_door_is_told_with_the_flag(run, asked, monkeypatch):
    def full(*_, **__):
        raise MemoryError

    monkeypatch.setattr("miles_dmd.modalities.diffusion.family.consistency.check_pipeline", full)
    code, lines, files = run()

    assert (code, len(lines), files) == (2, 1, [])
    assert f"--hf-checkpoint {asked[1]}: there is no memory left" in lines[0]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("checkpoint inspct x", "did you mean inspect?"),
        ("chekpoint inspect x", "did you mean checkpoint?"),
        ("checkpoint inspect", "DIR"),
        ("checkpoint inspect x --verfy", "--verfy"),
        ("checkpoint inspect ''", "DIR '' is empty"),
        ("checkpoint inspect PIPE", "is a pipe"),
    ],
)
def test_inspection_is_refused_in_one_line(capsys, tmp_path, words, told):
    os.mkfifo(tmp_path / "manifest.json")
    argv = [{"''": "", "PIPE": str(tmp_path)}.get(word, word) for word in words.split()]

    assert main(argv) == 2

    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


def test_dry_run_says_what_it_left_unchecked(asked, capsys):
    from miles_dmd.run import main as train

    assert train([*asked, "--ray-address", "host:1"]) == 0

    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith(
        "Not checked by --dry-run: GPUs were not counted; --ray-address host:1 was not asked; weights"
    )
