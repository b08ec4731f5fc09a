"""Streaming of an iterator into a callable, one remote call per item."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

POLL = 0.1
END = object()


class Fed:
    """Runs ``use`` in a thread. One item waits while another is used; a third is not taken before."""

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
                raise RuntimeError("what is fed has ended, and there was more for it")
            try:
                self._items.put(item, timeout=POLL)
            except queue.Full:
                continue
            return

    def finish(self) -> Any:
        """There is no more: waits until all is used. Returns what ``use`` returns, or raises what it has raised."""
        self.put(END)
        return self._used.result()
