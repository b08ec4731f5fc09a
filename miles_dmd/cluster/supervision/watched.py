"""Health, log and stack-trace methods of every actor, answered while it works.

All are answered by threads of their own. So the actor's work runs in a thread too, always the same one: Ray keeps the
main thread for actors without such groups.
"""

from __future__ import annotations

import functools
import inspect
import logging
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import ray

GROUP = "watch"
Record = tuple[str, int, str]
"""Logger, level and message."""
END: Record = ("", logging.NOTSET, "")
"""Everything logged before it has been taken."""


class LogRelay(logging.Handler):
    """Keeps warnings and progress until they are fetched: what an actor prints is seen by nobody."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._records: queue.SimpleQueue[Record] = queue.SimpleQueue()

    def emit(self, record: logging.LogRecord) -> None:
        self._records.put((record.name, record.levelno, record.getMessage()))

    def take(self) -> list[Record]:
        """Wait for the first record; return it, and those behind it."""
        records = [self._records.get()]
        while not self._records.empty():
            records.append(self._records.get())
        return records

    def end(self) -> None:
        self._records.put(END)


@functools.cache
def _log_relay() -> LogRelay:
    """The relay of all our loggers in this process."""
    relay, ours = LogRelay(), logging.getLogger("miles_dmd")
    ours.setLevel(logging.INFO)
    ours.addHandler(relay)
    return relay


def _exit_as_error(method: Callable[..., Any]) -> Callable[..., Any]:
    """Raise where a plug-in calls sys.exit: the process would end, and nobody would know why."""

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except SystemExit as error:
            raise RuntimeError(f"called sys.exit({error.code})") from error

    return wrapped


class Watched:
    """Base of every actor."""

    def __init_subclass__(cls) -> None:
        for name, method in list(vars(cls).items()):
            if inspect.isfunction(method):
                setattr(cls, name, _exit_as_error(method))

    def __init__(self) -> None:
        _log_relay()  # before the first call, which may warn: the calls of two concurrency groups have no order

    @ray.method(concurrency_group=GROUP)  # type: ignore[untyped-decorator]
    def next_log_records(self) -> list[Record]:
        """Wait until this process logs something. Whoever waits for this call also learns of the process's end."""
        return _log_relay().take()

    @ray.method(concurrency_group=GROUP)  # type: ignore[untyped-decorator]
    def end_log(self) -> None:
        """Let ``next_log_records`` return END behind what was logged until now."""
        _log_relay().end()

    @ray.method(concurrency_group=GROUP)  # type: ignore[untyped-decorator]
    def started(self) -> None:
        """Return as soon as this process is there."""

    @ray.method(concurrency_group=GROUP)  # type: ignore[untyped-decorator]
    def stacks(self) -> str:
        """Stack traces of this process's Python threads."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return "\n".join(
            f"  thread {names.get(number, number)}\n{''.join(traceback.format_stack(frame))}"
            for number, frame in sys._current_frames().items()
            if number != threading.get_ident()
        )


def actor_class(kind: type[Watched]) -> Any:
    """``kind`` as Ray starts it."""
    return ray.remote(concurrency_groups={GROUP: 2})(kind)
