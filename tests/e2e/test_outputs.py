"""Real failures of outputs: a run goes on without those that it can spare, and is saved before others end it."""

import contextlib
import json
import os
import pty
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from miles_dmd.observe.metrics import read_metrics
from miles_dmd.run import DistillationTrainer

ROOT = Path(__file__).parents[2]
RUN = ("--local", "--num-rollout", "3", "--save-interval", "1", "--keep-checkpoints", "0")
WATCHED = ("--sample-prompts", "1", "--sample-interval", "1", "--keep-best", "min:actor/loss", "--tensorboard")
UNLIMITED = resource.RLIM_INFINITY


class AtStep:
    """A hook of the user's own that does something once."""

    def __init__(self, step, act):
        self.step, self.act = step, act

    def after_completed_step(self, counters, metrics, executor):
        if counters.global_step == self.step:
            self.act()


@pytest.fixture
def begin(flags, tmp_path):
    """``begin(stderr=...)``: the smallest run in a process of its own, three cycles."""
    started = []

    def start(**streams):
        words = flags("--local", "--save", str(tmp_path / "run"))
        command = [sys.executable, str(ROOT / "train_diffusion.py"), *words]
        started.append(subprocess.Popen(command, cwd=tmp_path, **streams))
        return started[-1]

    yield start
    for process in started:
        with process, contextlib.suppress(ProcessLookupError):  # its pipes are closed
            process.kill()


def assert_whole(directory, cycles=3):
    assert [row["cycle"] for row in read_metrics(directory / "metrics.jsonl")] == list(range(1, cycles + 1))
    assert (directory / "student" / "distillation.json").is_file()
    assert json.loads((directory / "summary.json").read_text())["counters"]["completed_cycles"] == cycles


def test_log_on_a_full_disk(begin, tmp_path):
    with open("/dev/full", "wb") as full:
        run = begin(stdout=subprocess.PIPE, stderr=full, text=True)
    out, _ = run.communicate()

    assert run.returncode == 0
    assert [line for line in out.splitlines() if line.startswith("warning:")] == [
        "warning: stderr cannot be written to (No space left on device); the run goes on without it"
    ]
    assert_whole(tmp_path / "run")


def test_both_streams_into_pipes_that_nobody_reads(begin, tmp_path):
    """``python train_diffusion.py 2>&1 | head -1``"""
    reader, writer = os.pipe()
    run = begin(stdout=writer, stderr=writer)
    os.close(writer)
    os.read(reader, 1)
    os.close(reader)

    assert run.wait() == 0
    assert_whole(tmp_path / "run")


def test_terminal_that_is_closed_in_the_middle(begin, tmp_path):
    terminal, theirs = pty.openpty()
    run = begin(stdout=subprocess.PIPE, stderr=theirs, text=True, env=os.environ | {"TERM": "xterm"})
    os.close(theirs)
    seen = b""
    while b"/3" not in seen:  # the bar is there; which of its numbers are drawn is up to the machine
        seen += os.read(terminal, 1000)
    os.close(terminal)
    out, _ = run.communicate()

    assert run.returncode == 0
    assert out.count("warning: stderr cannot be written to (") <= 1  # none where it was at its last line
    assert_whole(tmp_path / "run")


def in_the_way(path):
    """Block a file: nothing can be renamed to a directory that holds something."""
    shutil.rmtree(path, ignore_errors=True)
    (path / "something").mkdir(parents=True)


def no_folder(path):
    shutil.rmtree(path, ignore_errors=True)
    path.touch()


def test_pictures_trace_and_summary_that_cannot_be_written(make_args, tmp_path, caplog):
    args = make_args(*RUN, *WATCHED, "--save", str(tmp_path))

    def sabotage():
        no_folder(tmp_path / "samples")
        for name in ("curves.png", "trace.json", "summary.json"):
            in_the_way(tmp_path / name)

    DistillationTrainer(args, hooks=AtStep(1, sabotage)).fit()

    said = [text.partition(" is left out, and the run goes on without it: ") for text in caplog.messages]
    assert [what for what, left_out, _ in said if left_out] == [
        "a grid of samples", "curves.png", "summary.json", "trace.json"
    ]  # fmt: skip
    assert [row["cycle"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert (tmp_path / "student" / "distillation.json").is_file()


def fill():
    """No file may grow: what a full disk does, and there is no file system of one's own for it without root."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, UNLIMITED))


def make_room():
    resource.setrlimit(resource.RLIMIT_FSIZE, (UNLIMITED, UNLIMITED))


@pytest.fixture
def room():
    yield
    make_room()


def test_disk_that_is_full_for_a_while_costs_a_tracker_and_no_row(make_args, tmp_path, caplog, room):
    run = ("--local", "--num-rollout", "3", "--save-interval", "9", "--on-save-failure", "continue")
    args = make_args(*run, *WATCHED, "--save", str(tmp_path))

    DistillationTrainer(args, hooks=[AtStep(1, fill), AtStep(2, make_room)]).fit()

    # of ours alone: torch logs every save, where a test before this one has made it talk
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("miles_dmd")]
    said = sorted(text.replace(str(tmp_path), "") for text in ours if "alarm" not in text)
    assert [text.partition(" is left out")[0].partition(":")[0][:24] for text in said] == [
        "--tensorboard", "/metrics.jsonl", "a grid of samples", "the best student, of ste"
    ]  # fmt: skip
    assert json.loads((tmp_path / "student_best" / "best.json").read_text())["global_step"] > 1
    assert_whole(tmp_path, cycles=4)


def state(checkpoint):
    tensors = {
        f"{file.relative_to(checkpoint)}: {name}": value
        for file in sorted(checkpoint.rglob("*.safetensors"))
        for name, value in load_file(file).items()
    }
    driver = json.loads((checkpoint / "driver.json").read_text())
    return tensors, {name: value for name, value in driver.items() if name != "run"}


def assert_equal_ends(one, other):
    (a, driver), (b, other_driver) = (state(run / "checkpoints" / "cycle_000004") for run in (one, other))
    assert a.keys() == b.keys()
    assert [name for name in a if not a[name].equal(b[name])] == []
    assert driver == other_driver


def fail():
    raise RuntimeError("made to fail")


def test_run_that_a_hook_ends_is_saved_and_goes_on_bit_equal(make_args, tmp_path):
    """The checkpoint interval would have lost both of its cycles."""
    seldom = (*RUN, "--save-interval", "100", "--keep-best", "min:actor/loss", "--sample-interval", "1")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    DistillationTrainer(make_args(*seldom, "--save", str(whole))).fit()
    trainer = DistillationTrainer(make_args(*seldom, "--save", str(broken)), hooks=AtStep(2, fail))

    with pytest.raises(RuntimeError, match="made to fail") as raised:
        trainer.fit()

    saved = broken / "checkpoints" / "cycle_000003"
    assert trainer.last_checkpoint == saved
    assert "the cycle is saved" in raised.value.__notes__[-1]
    assert [row["cycle"] for row in read_metrics(broken / "metrics.jsonl")] == [1, 2, 3]
    DistillationTrainer(make_args(*seldom, "--save", str(broken), "--load", "latest")).fit()
    assert_equal_ends(broken, whole)
    assert_whole(broken, cycles=4)
