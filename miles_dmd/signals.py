"""SIGINT, SIGTERM and SIGHUP: the first asks a run to stop, a second one ends it at once.

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

from miles_dmd.early import handled_signals
from miles_dmd.streams import drop_lost_terminal, say_at_once


class Stopped(KeyboardInterrupt):
    """The run was told to stop, by ``signal``."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.signal = signal.Signals(number)


class StopRequest:
    """The signal received so far, if any. Without ``listening`` there is never one."""

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
        """The handler of all of them."""
        if number == signal.SIGHUP:
            drop_lost_terminal()
            if self.signal is not None:
                return
        if self.signal is not None:
            leave_at_once(number)
        self.signal = number
        if not self._finishes_cycle:
            raise Stopped(number)
        name = signal.Signals(number).name
        say_at_once(f"{name}: finishing the running cycle to save it; a second signal leaves at once")


@contextlib.contextmanager
def listening(request: StopRequest) -> Iterator[None]:
    """Send signals that are not ignored to ``request`` within the block. Nothing happens outside the main thread, which
    alone may set handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, request.receive) for number in handled_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: one that is not Python's


def leave_at_once(number: int) -> NoReturn:
    """Without any tidying here: what this process started sees its end, and goes too."""
    os._exit(128 + number)
