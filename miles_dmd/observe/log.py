"""Log format and levels: one line per record on standard error."""

import logging
import sys
from typing import Any, TextIO

from miles_dmd.shown import printable

LEVELS = ("debug", "info", "warning", "error")
OURS = "miles_dmd"
LONGEST = 100_000
"""Characters of a message; a longer one is cut in its middle."""


def setup_logging(level: str = "info") -> None:
    """Log to standard error: this package from ``level`` on, others from warning on ("debug": from info on).

    May be called again.

    Raises ValueError for a level that is not in LEVELS.
    """
    if level not in LEVELS:
        raise ValueError(f"unknown log level {level!r}: one of {', '.join(LEVELS)}")
    handler = StandardError()
    handler.setFormatter(OneLine("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [other for other in root.handlers if not isinstance(other, StandardError)] + [handler]
    own = logging.getLogger(OURS)
    own.setLevel(level.upper())
    root.setLevel(logging.INFO if level == "debug" else max(logging.WARNING, own.level))
    logging.captureWarnings(True)


class OneLine(logging.Formatter):
    """A message of several lines becomes one, without what a terminal would obey; a traceback keeps its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        lines = [line.strip() for line in record.message.splitlines() if line.strip()]
        record.message = printable(" | ".join(lines), longest=LONGEST)
        return super().formatMessage(record)


class StandardError(logging.StreamHandler[Any]):
    """Writes to whatever ``sys.stderr`` is at that moment: a progress bar may have taken its place."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr
