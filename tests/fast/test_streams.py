"""Standard streams that are closed, full or lost, at the door of every program."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from miles_dmd.streams import drop_lost_terminal, open_closed_streams

ROOT = Path(__file__).parents[2]
TRAIN = [sys.executable, str(ROOT / "train_diffusion.py")]
PACKAGE = [sys.executable, "-m", "miles_dmd"]
SHOWN = {
    "help": [*TRAIN, "--help"],
    "dry run": [*TRAIN, "--config", "digits", "--dry-run"],
    "train help": [*PACKAGE, "train", "--help"],
    "version": [*PACKAGE, "--version"],
}
REFUSED = {
    "flag": [*TRAIN, "--lr", "fast"],
    "inspect": [*PACKAGE, "checkpoint", "inspect", "nowhere"],
    "words": [*PACKAGE, "checkpoint", "inspect"],
}


def in_shell(words, redirection, tmp_path):
    return subprocess.run(
        ["bash", "-c", f'"$@" {redirection}', "bash", *words], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("what", ["dry run", "version"])
def test_a_closed_stream_does_not_matter(tmp_path, what, closed):
    done = in_shell(SHOWN[what], closed, tmp_path)

    assert (done.returncode, done.stderr) == (0, "")
    assert bool(done.stdout) == (">&-" not in closed.split())


@pytest.mark.parametrize("what", REFUSED)
def test_a_refusal_that_nobody_hears_has_its_exit_code(tmp_path, what):
    done = in_shell(REFUSED[what], "2>&-", tmp_path)

    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize("what", SHOWN)
def test_output_that_cannot_be_written_is_told_in_one_line(tmp_path, what):
    done = in_shell(SHOWN[what], ">/dev/full", tmp_path)

    (line,) = done.stderr.splitlines()
    assert done.returncode == 1
    assert line.endswith(": standard output cannot be written (No space left on device)")


@pytest.mark.parametrize("what", SHOWN)
def test_a_reader_who_has_seen_enough_is_no_failure(tmp_path, what):
    done = in_shell(SHOWN[what], "| true; exit ${PIPESTATUS[0]}", tmp_path)

    assert (done.returncode, done.stderr) == (0, "")


def test_a_file_never_gets_the_number_of_a_closed_stream(tmp_path):
    """Or what is said on descriptor 2, by a signal handler or a library, stands in that file."""
    code = (
        "import os; from miles_dmd.early import prepare_process; prepare_process('x'); "
        "file = open('checkpoint', 'wb'); "
        "os.write(2, b'said'); raise SystemExit(file.fileno() < 3)"
    )

    done = in_shell([sys.executable, "-c", code], "<&- >&- 2>&-", tmp_path)

    assert done.returncode == 0
    assert (tmp_path / "checkpoint").read_bytes() == b""


def test_children_inherit_open_streams(tmp_path):
    code = (
        "from miles_dmd.early import prepare_process; prepare_process('x'); "
        "import subprocess; subprocess.run(['sh', '-c', '{}'])"
    )
    script = f"for n in 0 1 2; do test -e /proc/self/fd/$n; echo $? >> {tmp_path}/found; done"

    in_shell([sys.executable, "-c", code.format(script)], "<&- >&- 2>&-", tmp_path)

    assert (tmp_path / "found").read_text().split() == ["0", "0", "0"]


def test_open_streams_stay_what_they_are():
    before = [os.fstat(number) for number in (0, 1, 2)]

    open_closed_streams()
    drop_lost_terminal()

    assert [os.fstat(number) for number in (0, 1, 2)] == before


def test_a_lost_terminal_is_dropped():
    ours, theirs = pty.openpty()
    keep = os.dup(2)
    os.dup2(theirs, 2)
    try:
        drop_lost_terminal()
        still = os.isatty(2)
        os.close(ours)
        drop_lost_terminal()
        os.write(2, b"said")
        gone = os.path.samestat(os.fstat(2), os.stat(os.devnull))
    finally:
        os.dup2(keep, 2)
        os.close(keep)
        os.close(theirs)

    assert (still, gone) == (True, True)
