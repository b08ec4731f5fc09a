"""What does a run do when it is told to stop? The first SIGINT or SIGTERM asks it to, a second one ends it at once.

while nothing can be saved      the running cycle is abandoned: ``Stopped`` is raised where the run stands
while it can be                 the running cycle is finished and saved; whoever plays the cycles asks ``requested``
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """The run was told to stop, by ``signal``; the exit code is the shell's for it: 130 or 143."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.signal = signal.Signals(number)

    @property
    def exit_code(self) -> int:
        return 128 + self.signal


class StopRequest:
    """What was asked so far. Without ``listening`` nobody ever asks."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._finishes_cycle = False

    @property
    def requested(self) -> bool:
        return self.signal is not None

    def raise_if_requested(self) -> None:
        if self.signal is not None:
            raise Stopped(self.signal)

    @contextlib.contextmanager
    def finishing_cycles(self) -> Iterator[None]:
        """Within the block a first signal raises nothing: the block ends by itself, and soon."""
        self.raise_if_requested()
        self._finishes_cycle = True
        try:
            yield
        finally:
            self._finishes_cycle = False

    def receive(self, number: int, frame: FrameType | None = None) -> None:
        """The handler of both signals."""
        if self.signal is not None:
            leave_at_once(number)
        self.signal = number
        if not self._finishes_cycle:
            raise Stopped(number)
        # not print: the handler may have interrupted one
        name = signal.Signals(number).name
        with contextlib.suppress(OSError):  # nobody may read it any more, and the cycle is finished all the same
            os.write(2, f"{name}: finishing the running cycle to save it; a second signal leaves at once\n".encode())


@contextlib.contextmanager
def listening(request: StopRequest) -> Iterator[None]:
    """Both signals go to ``request`` within the block. Nothing happens outside the main thread, which alone may."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, request.receive) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave_at_once(number: int) -> NoReturn:
    """Without any tidying here: what this process started sees its end, and goes too."""
    os._exit(128 + number)
