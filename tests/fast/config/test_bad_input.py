"""Does each way to ask for what cannot be end in one line, exit code 2, and nothing written?"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def run(tmp_path, asked, capsys, monkeypatch):
    """(exit code, lines on stderr, what was written) of the command line, in an empty directory."""
    from miles_dmd.run import main

    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)

    def ask(*flags, whole=True):
        code = main([*(asked if whole else []), *flags])
        return code, capsys.readouterr().err.splitlines(), list(work.iterdir())

    return ask


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--loss-tipe", "dmd2"], ["--loss-tipe dmd2", "did you mean --loss-type?"]),
        (["--critic-learning", "1"], ["--critic-learning 1", "--critic-"]),
        (["-lr", "1"], ["-lr 1", "did you mean --lr?"]),
        (["--rollout-batch", "8"], ["--rollout-batch 8", "did you mean --rollout-batch-size?"]),
        (["--lr"], ["--lr", "expected one argument"]),
        (["--betas", "0.9"], ["--betas", "expected 2 arguments"]),
        (["--local", "yes"], ["'yes'", "--no-local"]),
        (["--local=yes"], ["--local", "yes"]),
        (["stray"], ["'stray'"]),
        (["--teacher-lr", "1e-5"], ["--teacher-lr 1e-5", "'dmd2' has no group 'teacher'", "critic, actor"]),
        (["--config", "digitz"], ["--config 'digitz'", "digits", "did you mean digits?"]),
        (["--loss-type", "dmd3"], ["--loss-type 'dmd3'", "dmd2"]),
        (["--loss-type", "no_lab.loss"], ["--loss-type no_lab.loss", "PYTHONPATH"]),
        (["--model-family", "sd9"], ["--model-family 'sd9'", "sd3"]),
        (["--num-rollout", "0"], ["--num-rollout 0", "at least 1"]),
        (["--num-rollout", "-3"], ["--num-rollout -3", "at least 1"]),
        (["--num-rollout", "1.5"], ["--num-rollout '1.5'", "whole number"]),
        (["--num-rollout", "true"], ["--num-rollout 'true'", "whole number"]),
        (["--num-rollout", "1e3"], ["--num-rollout '1e3'", "write 1000"]),
        (["--fake-update-ratio", "0"], ["--fake-update-ratio", "0"]),
        (["--fake-update-ratio", "2.5"], ["--fake-update-ratio '2.5'"]),
        (["--lr", "-1e-5"], ["--lr -1e-05", "above 0"]),
        (["--lr", "inf"], ["--lr inf", "finite"]),
        (["--teacher-guidance", "nan"], ["--teacher-guidance nan", "finite"]),
        (["--teacher-guidance", "0"], ["--teacher-guidance 0"]),
        (["--dm-sigma-min", "0.5", "--dm-sigma-max", "0.4"], ["--dm-sigma-min 0.5", "--dm-sigma-max 0.4"]),
        (["--device", "tpu"], ["--device 'tpu'", "auto, cpu, cuda"]),
        (["--rollout-batch-size", "33", "--num-trainer-ranks", "2"], ["--rollout-batch-size 33", "nearest", "32"]),
        (["--hf-checkpoint", "/no/such"], ["--hf-checkpoint /no/such", "no directory"]),
        (["--prompt-data", "/no/such.txt"], ["--prompt-data /no/such.txt", "no such file"]),
        (["--save", __file__], [f"--save {__file__}", "is a file"]),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_and_nothing_is_written(run, flags, parts):
    code, lines, written = run(*flags)

    assert (code, len(lines), written) == (2, 1, [])
    assert all(part in lines[0] for part in parts), lines[0]


def test_a_loss_type_alone_is_told_what_it_needs(run):
    code, lines, written = run("--loss-type", "dmd2", whole=False)

    assert (code, len(lines), written) == (2, 1, [])
    assert all(part in lines[0] for part in ("--hf-checkpoint", "--prompt-data", "--config digits"))


def test_a_directory_that_holds_another_run_is_left_alone(run, tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metrics.jsonl").write_text("{}\n")

    code, lines, written = run("--save", str(tmp_path / "old"))

    assert (code, len(lines), written) == (2, 1, [])
    assert all(part in lines[0] for part in (f"--save {tmp_path / 'old'}", "--overwrite", "--load"))
    assert (tmp_path / "old" / "metrics.jsonl").read_text() == "{}\n"


@pytest.mark.parametrize(
    ("argv", "code", "text"),
    [
        (["--loss-type", "dmd2"], 2, "--prompt-data"),
        (["--lr", "abc"], 2, "--lr 'abc'"),
        (["--help"], 0, "--fake-update-ratio"),
    ],
)
def test_the_program_itself_answers_so(tmp_path, argv, code, text):
    done = subprocess.run(
        [sys.executable, ROOT / "train_diffusion.py", *argv], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert done.returncode == code
    assert text in (done.stdout if code == 0 else done.stderr)
    assert len(done.stderr.splitlines()) == (0 if code == 0 else 1)
    assert os.listdir(tmp_path) == []
