"""Standard streams that were closed, whose terminal is gone, or whose reader is. Nothing but the standard library."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from typing import NoReturn

NAMES = ("stdin", "stdout", "stderr")


class OutputError(OSError):
    """Standard output cannot be written to: its disk is full, or its reader has gone."""

    @property
    def reader_gone(self) -> bool:
        """True for a closed pipe, such as that of ``| head``: its reader has seen enough, nothing is wrong."""
        return self.errno == errno.EPIPE

    def __str__(self) -> str:
        return f"standard output cannot be written ({self.strerror})"


def open_closed_streams() -> None:
    """Open /dev/null for the standard streams that the parent closed (``2>&-``).

    Python leaves them None, and the next file that is opened would get the number of one: what a signal handler says on
    descriptor 2 would stand in a checkpoint.
    """
    for descriptor, name in enumerate(NAMES):
        if getattr(sys, name) is None:
            redirect_to_null(descriptor)
            # open as long as the process lives
            stream = open(descriptor, "r" if descriptor == 0 else "w", encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def drop_lost_terminal() -> None:
    """Redirect to /dev/null what cannot be written to any more since its terminal closed."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")  # Linux answers EIO from then on, also for nothing
        except OSError:
            redirect_to_null(descriptor)


def redirect_to_null(descriptor: int) -> None:
    """Put /dev/null in the place of ``descriptor``, for this process and those that it starts."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, descriptor)
    if nowhere == descriptor:
        os.set_inheritable(descriptor, True)
    else:
        os.close(nowhere)


def say(line: str) -> None:
    """Print a line on standard error, as far as that can be: what cannot be told must not hide what happened."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def say_at_once(line: str) -> None:
    """Print a line on standard error from within a signal handler, which may have interrupted a print."""
    with contextlib.suppress(OSError):
        os.write(2, (line + "\n").encode("utf-8", "backslashreplace"))


def show(text: str = "") -> None:
    """Print ``text`` on standard output, and whatever it still holds, at once. Raises OutputError."""
    try:
        print(text, end="\n" if text else "", flush=True)
    except OSError as error:
        redirect_to_null(1)  # the buffer keeps it, and Python would fail once more at its end
        raise OutputError(error.errno, error.strerror) from error


def leave(program: str, status: int | str | None) -> NoReturn:
    """Exit with ``status``; with 1 where all went well but what was to be shown cannot be written."""
    try:
        show()
    except OutputError as error:
        if not error.reader_gone:
            say(f"{program}: {error}")
            status = status or 1
    sys.exit(status)
