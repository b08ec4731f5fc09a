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


Said = tuple[str, int, str]
"""Logger, level and message."""
END: Said = ("", logging.NOTSET, "")
"""All that was said before it has been taken."""


class News(logging.Handler):
    """Keeps warnings and progress until they are fetched: what an actor prints is seen by nobody."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._said: queue.SimpleQueue[Said] = queue.SimpleQueue()

    def emit(self, record: logging.LogRecord) -> None:
        self._said.put((record.name, record.levelno, record.getMessage()))

    def take(self) -> list[Said]:
        """Waits for the first."""
        said = [self._said.get()]
        while not self._said.empty():
            said.append(self._said.get())
        return said

    def end(self) -> None:
        """Whoever waits hears what was said so far, and that it is all."""
        self._said.put(END)


@functools.cache
def _news() -> News:
    """Of all of ours in this process."""
    news = News()
    ours = logging.getLogger("miles_dmd")
    ours.setLevel(logging.INFO)
    ours.addHandler(news)
    return news


def _exits_told(method: Callable[..., Any]) -> Callable[..., Any]:
    """A plug-in that exits would end the process, and nobody would know why it died."""

    @functools.wraps(method)
    def told(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except SystemExit as error:
            raise RuntimeError(f"called sys.exit({error.code})") from error

    return told


class Watched:
    def __init_subclass__(cls) -> None:
        for name, method in list(vars(cls).items()):
            if inspect.isfunction(method):
                setattr(cls, name, _exits_told(method))

    def __init__(self) -> None:
        _news()  # before the first call, which may warn: the calls of two concurrency groups have no order

    @ray.method(concurrency_group=GROUP)  # type: ignore[untyped-decorator]
    def until_news(self) -> list[Said]:
        """Returns when this process has something to say; who waits for it also hears of its end."""
        return _news().take()

    @ray.method(concurrency_group=GROUP)  # type: ignore[untyped-decorator]
    def end_news(self) -> None:
        """``until_news`` returns END behind what was said until now."""
        _news().end()

    @ray.method(concurrency_group=GROUP)  # type: ignore[untyped-decorator]
    def started(self) -> None:
        """Returns as soon as this process is there."""

    @ray.method(concurrency_group=GROUP)  # type: ignore[untyped-decorator]
    def stacks(self) -> str:
        """Where each of this process's Python threads is."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return "\n".join(
            f"  thread {names.get(number, number)}\n{''.join(traceback.format_stack(frame))}"
            for number, frame in sys._current_frames().items()
            if number != threading.get_ident()
        )


def actor_class(kind: type[Watched]) -> Any:
    """``kind`` as Ray starts it."""
    return ray.remote(concurrency_groups={GROUP: 2})(kind)
