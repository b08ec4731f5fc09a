"""Checks before the package is imported: a Python that is too old, and signals that the parent ignores."""

import ast
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from miles_dmd import early

ROOT = Path(__file__).parents[2]
PROGRAMS = {
    "train_diffusion.py": [str(ROOT / "train_diffusion.py"), "--config", "digits", "--dry-run"],
    "miles-dmd": ["-m", "miles_dmd", "checkpoint", "inspect", "nowhere"],
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_python_that_is_too_old_is_told_in_one_line(tmp_path, program):
    """It says that it is 3.10, and refuses what that one has not."""
    (tmp_path / "sitecustomize.py").write_text(
        "import datetime, sys, typing\n"
        "sys.version_info = (3, 10, 12, 'final', 0)\n"
        "del datetime.UTC, typing.Self, typing.assert_never\n"
    )
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}

    done = subprocess.run([sys.executable, *PROGRAMS[program]], capture_output=True, text=True, env=env, timeout=60)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"{program}: error: Python 3.10.12 is too old; make the environment with Python 3.11 or newer\n"
    )


@pytest.mark.parametrize(
    "path", ["train_diffusion.py", *(f"miles_dmd/{name}.py" for name in ("__init__", "__main__", "early", "streams"))]
)
def test_what_tells_it_can_be_read_by_python_3_8(path):
    ast.parse((ROOT / path).read_text(encoding="utf-8"), feature_version=(3, 8))


def test_the_oldest_python_is_the_declared_one():
    declared = f'requires-python = ">={".".join(map(str, early.OLDEST))}"'

    assert declared in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize("number", early.SIGNALS, ids=lambda number: number.name)
def test_a_signal_that_the_parent_ignores_stays_ignored(number):
    """nohup ignores SIGHUP, and a shell SIGINT for what a script runs in the background."""
    code = (
        "import os, signal; from miles_dmd.early import prepare_process; from miles_dmd.signals import *\n"
        "prepare_process('x')\n"
        f"os.kill(os.getpid(), {int(number)})\n"
        "with listening(request := StopRequest()): os.kill(os.getpid(), %d)\n"
        % number
        + f"os.kill(os.getpid(), {int(number)})\n"
        "print(request.requested)"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
        preexec_fn=lambda: signal.signal(number, signal.SIG_IGN),
    )  # fmt: skip

    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


def test_the_others_are_heard_then():
    code = (
        "import os, signal; from miles_dmd.early import prepare_process; prepare_process('x'); "
        "os.kill(os.getpid(), signal.SIGTERM)"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )  # fmt: skip

    assert (done.returncode, done.stderr) == (143, "x: stopped by SIGTERM\n")
