"""Whoever reads the console, or stops reading it: the process goes on, says it once, and ends as it would have."""

import os
import subprocess
import sys

import pytest

SPEAKING = """
import logging, sys
from miles_dmd.observe.console import lasting_console
from miles_dmd.observe.log import setup_logging

@lasting_console()
def main():
    setup_logging()
    print("first", flush=True)
    sys.stdin.readline()  # until the other side has done what it does
    for number in range(3):
        print(number, flush=True)
        print("x" * 10_000)
        print(number, file=sys.stderr)
        logging.getLogger("miles_dmd").warning("%d", number)
    open(sys.argv[1], "w").close()

main()
"""


@pytest.fixture
def speak(tmp_path):
    """``speak(done, before=..., stdout=...)``: the exit code, and what the streams that are pipes had to say."""

    def run(before=lambda: None, close=(), **streams):
        command = [sys.executable, "-c", SPEAKING, str(tmp_path / "done")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, text=True, **streams) as process:
            for descriptor in close:
                os.close(descriptor)
            before()
            out, error = process.communicate("go on\n")
        assert (tmp_path / "done").exists()
        return process.returncode, out, error

    return run


def test_full_disk_under_standard_error(speak):
    with open("/dev/full", "w") as full:
        code, out, _ = speak(stdout=subprocess.PIPE, stderr=full)

    assert code == 0
    assert [line for line in out.splitlines() if not line.startswith("x")] == [
        "first", "0", "warning: stderr cannot be written to (No space left on device); the run goes on without it",
        "1", "2",
    ]  # fmt: skip


def test_full_disk_under_standard_output(speak):
    with open("/dev/full", "w") as full:
        code, _, error = speak(stdout=full, stderr=subprocess.PIPE)

    assert code == 0
    assert error.splitlines()[0] == (
        "warning: stdout cannot be written to (No space left on device); the run goes on without it"
    )
    assert error.count("warning: ") == 1
    assert [line for line in error.splitlines()[1:] if "WARNING" not in line] == ["0", "1", "2"]


@pytest.mark.parametrize("both", [True, False])
def test_pipe_whose_reader_is_gone(speak, both):
    reader, writer = os.pipe()

    def leave():
        assert os.read(reader, 1) == b"f"
        os.close(reader)

    code, _, error = speak(leave, [writer], stdout=writer, stderr=writer if both else subprocess.PIPE)

    assert code == 0
    assert both or error.count("warning: stdout cannot be written to (Broken pipe)") == 1
    assert both or "Traceback" not in error


def test_stream_of_somebody_else_comes_back(capsys):
    from miles_dmd.observe.console import lasting_console

    before = sys.stdout
    with lasting_console(), lasting_console():
        print("within")

    assert sys.stdout is before
    assert capsys.readouterr().out == "within\n"
