"""What every actor of a run can be asked while it works: whether it lives, what it has to say, and where it is.

All are answered by threads of their own. So the actor's work runs in a thread too, always the same one: Ray keeps the
main thread for actors without such groups.
"""

from __future__ import annotations

import functools
import logging
import queue
import sys
import threading
import traceback
from typing import Any

import ray

GROUP = "watch"


Said = tuple[str, int, str]
"""Logger, level and message."""
END: Said = ("", logging.NOTSET, "")
"""All that was said before it has been taken."""


class News(logging.Handler):
    """Keeps warnings until they are fetched: what an actor prints is seen by nobody."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
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
    logging.getLogger("miles_dmd").addHandler(news)
    return news


class Watched:
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
