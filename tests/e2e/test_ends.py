"""Ends of a run, and refusals to begin: signals at every moment, a second run in one directory, all kinds of errors."""

import fcntl
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest
from processes import wait_for

from miles_dmd.run import main

ROOT = Path(__file__).parents[2]
FAULTY = ("--loss-type", "faulty.loss", "--rollout-engine", "faulty.engine", "--save-interval", "1")
INTERRUPT = """
import os, signal, sys

def interrupt(event, arguments):
    if event == "import" and arguments[0] == {module!r}:
        os.kill(os.getpid(), signal.{name})

sys.addaudithook(interrupt)
"""


@pytest.fixture
def begin(tmp_path):
    """``begin("--local", ...)``: the command line in a process of its own."""
    started = []

    def start(words, **env):
        command = [sys.executable, str(ROOT / "train_diffusion.py"), *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, cwd=tmp_path, env=os.environ | env, **pipes))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.parametrize("name", ["SIGHUP", "SIGINT", "SIGTERM"])
@pytest.mark.parametrize(
    ("program", "words", "module"),
    [
        *(("train_diffusion.py", [str(ROOT / "train_diffusion.py")], f"miles_dmd.{module}")
          for module in ("run", "plan", "config.args", "plan.controller", "report")),
        *(("miles-dmd", ["-m", "miles_dmd", "checkpoint", "inspect", "."], module)
          for module in ("argparse", "miles_dmd.checkpoint.inspect")),
    ],
)  # fmt: skip
def test_signal_while_python_imports_ends_it_in_one_line(tmp_path, program, words, module, name):
    """Python sends it to itself, at that very import."""
    (tmp_path / "sitecustomize.py").write_text(INTERRUPT.format(module=module, name=name))
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}

    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=env, timeout=250)

    assert done.returncode == 128 + signal.Signals[name]
    assert done.stderr == f"{program}: stopped by {name}\n"


@pytest.fixture
def held(faults, flags, begin, tmp_path):
    """A run that stands still in its student phase."""
    (faults / "order").write_text("hold student 1")
    run = tmp_path / "run"
    process = begin(flags(*FAULTY, "--local", "--save", str(run)))
    wait_for(lambda: (faults / "held-actor-0").exists() or process.poll() is not None, 250, "student phase")
    assert process.poll() is None
    yield run
    for path in faults.iterdir():
        path.unlink()


def contents(directory):
    return {path: path.stat().st_mtime_ns for path in sorted(directory.rglob("*"))}


@pytest.mark.long
@pytest.mark.parametrize("more", [("--overwrite",), ("--load", "latest")])
def test_second_run_at_the_same_directory_is_refused_at_its_door(held, flags, begin, more):
    before = contents(held)

    second = begin(flags(*FAULTY, *more, "--save", str(held)))
    out, error = second.communicate(timeout=250)

    assert second.returncode == 2
    assert error == (
        f"train_diffusion.py: error: --save {held}: another run writes to it; end that one, or name another\n"
    )
    assert "Starting Ray" not in out
    assert contents(held) == before


@pytest.mark.long
def test_runs_without_a_directory_of_their_own_do_not_meet(flags, begin, tmp_path):
    runs = [begin(flags("--local", "--num-rollout", "1", "--save-interval", "1")) for _ in range(3)]

    ends = [run.communicate(timeout=240) for run in runs]

    assert [run.returncode for run in runs] == [0, 0, 0], ends
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["dmd2-1", "dmd2-2", "dmd2-3"]
    assert all((tmp_path / "runs" / f"dmd2-{n}" / "student").is_dir() for n in (1, 2, 3))


@pytest.fixture
def order(faults):
    """For a run in this process."""
    from faulty.places import VISITS

    VISITS.clear()
    yield (faults / "order").write_text
    for path in faults.iterdir():
        path.unlink()


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("break student 2", "RuntimeError: made to break (actor rank 0, while training)"),
        ("break sampling 2", "RuntimeError: made to break (the rollout worker, while sampling)"),
        ("exit student 2", "SystemExit: 7 (actor rank 0, while training)"),
        ("cancel sync 2", "CancelledError: (the rollout worker, while taking new weights)"),
        ("full fake 3", "OSError: [Errno 28] No space left on device (critic rank 0, while training)"),
        ("full sync 1", "OSError: [Errno 28] No space left on device (the rollout worker, while taking new weights)"),
        ("refuse sync 1", "ConfigError: --lr 0 is too small (the rollout worker, while taking new weights)"),
    ],
)
def test_any_error_in_one_process_is_told_in_one_line(order, flags, tmp_path, capsys, place, said):
    order(place)

    status = main(flags(*FAULTY, "--local", "--save", str(tmp_path)))

    shown = capsys.readouterr().err
    newest = max(path for path in (tmp_path / "checkpoints").iterdir() if path.is_dir())
    assert status == 1
    assert shown.splitlines()[-1] == (
        f"train_diffusion.py: {said}; go on with --load {newest} --save {tmp_path}; "
        f"traceback in {tmp_path / 'failure.log'}"
    )
    assert shown.count(said[:20]) == 1
    assert "Traceback" not in shown
    assert "faulty/places.py" in (tmp_path / "failure.log").read_text()


def test_run_that_fails_before_its_first_checkpoint_names_the_one_it_came_from(order, flags, tmp_path, capsys):
    assert main(flags("--local", "--num-rollout", "1", "--save", str(tmp_path / "first"))) == 0
    order("break sampling 1")
    loaded = tmp_path / "first" / "checkpoints" / "cycle_000002"

    status = main(flags("--rollout-engine", "faulty.engine", "--local", "--allow-changed", "rollout-engine", "--load",
                        str(loaded), "--save", str(tmp_path / "second"), "--num-rollout", "3"))  # fmt: skip

    assert status == 1
    assert (
        f"; go on with --load {loaded}; traceback in {tmp_path / 'second' / 'failure.log'}" in capsys.readouterr().err
    )


def test_terminal_that_closes_lets_the_run_finish_its_cycle_and_save_it(flags, tmp_path):
    """As ssh does when its connection ends; whatever is written to the terminal fails from then on."""
    ours, theirs = pty.openpty()
    directory = tmp_path / "run"
    words = flags("--local", "--num-rollout", "5000", "--save-interval", "1000", "--save", str(directory))
    run = subprocess.Popen(
        [sys.executable, str(ROOT / "train_diffusion.py"), *words], stdin=theirs, stdout=theirs, stderr=theirs,
        start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY),
    )  # fmt: skip
    os.close(theirs)
    metrics, enough = directory / "metrics.jsonl", threading.Event()
    reader = threading.Thread(target=read_until, args=(enough, ours), daemon=True)
    reader.start()
    try:
        begun = lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > 3  # noqa: E731
        wait_for(lambda: begun() or run.poll() is not None, 240, "three cycles")
        assert run.poll() is None
        enough.set()
        reader.join()
        os.close(ours)  # the kernel sends SIGHUP
        code = run.wait(120)
    finally:
        run.kill()
        run.wait()

    cycle = json.loads(metrics.read_bytes().splitlines()[-1])["cycle"]
    manifest = directory / "checkpoints" / f"cycle_{int(cycle):06d}" / "manifest.json"
    assert code == 128 + signal.SIGHUP
    assert json.loads(manifest.read_text())["counters"]["completed_cycles"] == cycle


def read_until(enough, terminal):
    """A bar is drawn as long as somebody takes what it writes."""
    while not enough.is_set():
        if select.select([terminal], [], [], 0.05)[0]:
            os.read(terminal, 4096)


def test_cluster_that_does_not_answer_is_told_with_its_limit(flags, begin, tmp_path):
    """Somebody listens there, takes every connection, and says nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=50) as silent:
        threading.Thread(target=accept_all, args=(silent,), daemon=True).start()
        address = f"127.0.0.1:{silent.getsockname()[1]}"

        run = begin(flags("--ray-address", address, "--placement-timeout", "3", "--save", str(tmp_path / "run")))
        _, error = run.communicate(timeout=280)

    assert run.returncode == 1
    assert (
        f"--ray-address {address}: no Ray cluster answers there (no answer from Ray within 3 s; --placement-timeout 3 "
        "is the limit)"
    ) in error.splitlines()[-1]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["failure.log"]


def accept_all(server):
    connections = []
    while True:
        try:
            connections.append(server.accept())
        except OSError:
            return
