"""Outputs that a run can do without: trackers, pictures, a progress bar, a trace. A failure costs one warning."""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)


class BestEffort:
    """Writes ``what`` where that works. The first failure is a warning, and later ones are silent.

    What goes on from call to call is dropped at its first failure: half of it misleads, and a server that is gone would
    be waited for in every cycle. With ``each``, of files that do not depend on each other, the next is tried again.
    """

    def __init__(self, what: str, *, each: bool = False) -> None:
        self.what, self.each, self.failed = what, each, False

    def __call__(self, write: Callable[[], object]) -> None:
        if self.failed and not self.each:
            return
        try:
            write()
        except Exception as error:  # noqa: BLE001 - whatever it is, the weights are sound
            if not self.failed:
                logger.warning("%s is left out, and the run goes on without it: %s", self.what, _reason(error))
            self.failed = True


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}".rstrip(": ")
