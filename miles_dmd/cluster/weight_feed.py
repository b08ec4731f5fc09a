"""Streaming of an iterator into a callable, one remote call per item."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

POLL = 0.1
END = object()


class WeightFeed:
    """A thread that runs ``use``. One item waits while another is used; a third is not taken before."""

    def __init__(self, use: Callable[[Iterator[Any]], Any]) -> None:
        self._items: queue.Queue[Any] = queue.Queue(1)
        threads = ThreadPoolExecutor(1)
        self._used = threads.submit(use, iter(self._items.get, END))
        threads.shutdown(wait=False)

    def put(self, item: Any) -> None:
        """Raises what ``use`` has raised."""
        while True:
            if self._used.done():
                self._used.result()
                raise RuntimeError("the consumer has ended before its input")
            try:
                self._items.put(item, timeout=POLL)
            except queue.Full:
                continue
            return

    def finish(self) -> Any:
        """End the input, wait until all is used, and return what ``use`` returns, or raise what it has raised."""
        self.put(END)
        return self._used.result()
