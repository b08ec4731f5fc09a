"""Standard output and standard error that outlive their reader: a write that fails costs its text and nothing else.

A pipe whose reader is gone, a log on a full disk, a terminal that was closed: none of them is a reason to end a run of
days. The first failure of each stream is reported on the other one.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO, cast


class Lasting:
    """``stream`` whose failures end nothing; the first goes to ``report``. It is tried again: a disk may get room."""

    def __init__(self, stream: TextIO, report: Callable[[str], object]) -> None:
        self._stream, self._report, self.failed = stream, report, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except (OSError, ValueError) as error:  # ValueError: it was closed
            first, self.failed = not self.failed, True
            if first:
                self._report(str(getattr(error, "strerror", None) or error))

    def end(self) -> None:
        """Some library may have kept this object, and writes to it when Python exits: nothing is reported then. What
        the stream holds back, which Python tries to write at its exit, goes nowhere: it would end with code 120."""
        self._report = lambda reason: None
        if not self.failed:
            return
        try:
            self._stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):  # ValueError: no file, or a closed one
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


@contextlib.contextmanager
def lasting_console() -> Iterator[None]:
    """Within the block, or the function that this decorates, both streams are Lasting."""
    before = sys.stdout, sys.stderr
    wrapped = [_lasting("stdout", "stderr"), _lasting("stderr", "stdout")]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in wrapped:
            if stream is not None:
                stream.end()


def _lasting(name: str, other: str) -> Lasting | None:
    stream = getattr(sys, name)
    if stream is None or isinstance(stream, Lasting):
        return None

    def report(reason: str) -> None:
        standing = getattr(sys, other)
        if standing is not None:
            print(
                f"warning: {name} cannot be written to ({reason}); the run goes on without it",
                file=standing,
                flush=True,
            )

    lasting = Lasting(stream, report)
    setattr(sys, name, cast(TextIO, lasting))
    return lasting
