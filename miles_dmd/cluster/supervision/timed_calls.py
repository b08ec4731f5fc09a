"""Blocking Ray calls with a timeout, each in a thread of its own.

Ray's own calls wait without a limit.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, TypeVar

from ray.exceptions import RayError

from miles_dmd.errors import ClusterError

logger = logging.getLogger(__name__)
T = TypeVar("T")

LEAVING = 10.0
"""Seconds that ending actors, removing a placement and leaving a cluster may take, each."""
TICK = 0.5
"""Seconds between two looks at whether there is still somebody who could answer."""


class TimedCalls:
    """A thread that makes calls, one after the other, as long as this process lives.

    Not one a call: Linux ends Ray's servers with the thread that started them. After a call that did not end in time,
    or was interrupted, no other is made.
    """

    def __init__(self) -> None:
        self.stuck = ""
        """The call that was given up, or "": what was being done."""
        self.died: Callable[[], str] = lambda: ""
        """The part of Ray that is gone, or "". Nobody waits for what is gone: Ray's core ends this process some seconds
        after its GCS."""
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        threading.Thread(target=self._work, daemon=True, name="calls Ray").start()

    def run(self, doing: str, seconds: float, call: Callable[[], T], limit: str = "") -> T:
        """Return what ``call`` returns, or raise what it raises. Raises ClusterError after so many ``seconds``, which
        ``limit`` explains, and when Ray has died."""
        if self.stuck:
            raise ClusterError(f"Ray has not answered while {self.stuck}, and is not asked any more while {doing}")
        answer: Future[T] = Future()
        self._calls.put((answer, call))
        self.stuck = doing
        until = time.monotonic() + seconds
        try:
            while not wait([answer], min(TICK, until - time.monotonic())).done:
                if gone := self.died():
                    raise ClusterError(f"{gone} while {doing}")
                if time.monotonic() >= until:
                    named = f"; {limit} is the limit" if limit else ""
                    raise ClusterError(f"no answer from Ray within {seconds:g} s while {doing}{named}")
            return answer.result()
        finally:
            if answer.done():  # and neither late, nor interrupted by a signal
                self.stuck = ""

    @property
    def answers(self) -> bool:
        """True while Ray lives and has answered every call."""
        return not self.stuck and not self.died()

    def try_run(self, doing: str, call: Callable[[], object], seconds: float = LEAVING) -> bool:
        """``run`` for what a run does on its way out: whatever goes wrong is logged, and hides no other error."""
        try:
            self.run(doing, seconds, call)
        except (ClusterError, RayError) as error:
            logger.warning("%s", error)
            return False
        return True

    def _work(self) -> None:
        while True:
            answer, call = self._calls.get()
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 - it is raised where it was asked
                answer.set_exception(error)
            else:
                answer.set_result(result)
