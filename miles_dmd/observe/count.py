"""Progress of work that is counted: log lines like ``encoding prompts: 320 of 480, 0:12 left``, a few a minute."""

import logging
import time
from collections.abc import Callable

from miles_dmd.observe.progress import clock_time

logger = logging.getLogger(__name__)


class Count:
    """``at(done)`` after each piece; at most a line every ``min_seconds``, so what is done sooner stays silent.

    ``done`` pieces were there before, and say nothing of the pace. Whatever is logged in an actor is heard by the
    driver, which also knows by it that the actor works.
    """

    def __init__(
        self,
        what: str,
        total: int,
        *,
        done: int = 0,
        min_seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.what, self.total, self.min_seconds = what, total, min_seconds
        self._done_before, self._clock = done, clock
        self._began = self._logged = clock()
        self._lines = 0

    def at(self, done: int) -> None:
        now = self._clock()
        last = done == self.total and self._lines > 0
        if not last and now - self._logged < self.min_seconds:
            return
        self._logged, self._lines = now, self._lines + 1
        logger.info("%s: %s of %s%s", self.what, f"{done:,}", f"{self.total:,}", self._left(done, now))

    def _left(self, done: int, now: float) -> str:
        fresh = done - self._done_before
        if fresh <= 0 or done == self.total:
            return ""
        return f", {clock_time((now - self._began) / fresh * (self.total - done))} left"
