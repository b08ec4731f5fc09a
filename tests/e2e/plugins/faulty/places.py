"""Places at which a test can hold a process, and the traces that the process leaves there."""

import asyncio
import os
import time
from collections import Counter
from functools import cache
from pathlib import Path

from miles_dmd.errors import ConfigError

VISITS: Counter[str] = Counter()
ERRORS = {
    "break": lambda: RuntimeError("made to break"),
    "full": lambda: OSError(28, "No space left on device"),
    "exit": lambda: SystemExit(7),
    "cancel": lambda: asyncio.CancelledError(),
    "refuse": lambda: ConfigError("--lr 0 is too small"),
}


def directory() -> Path:
    return Path(os.environ["FAULTS"])


def order(what: str, place: str) -> str:
    """Last word of the order for ``place``, where there is one for ``what``; else nothing."""
    try:
        words = (directory() / "order").read_text().rsplit(maxsplit=2)
    except OSError:
        return ""
    return words[2] if words[:2] == [what, place] else ""


def come_to(place: str, who: str, rank: int = 0) -> None:
    VISITS[place] += 1
    (directory() / f"pid-{who}").write_text(str(os.getpid()))
    count = str(VISITS[place])
    if order("raise", place) == count and rank == 1:
        (directory() / "raised").touch()
        raise RuntimeError("made to raise\nin the middle of a collective")
    for what, error in ERRORS.items():
        if order(what, place) == count:
            raise error()
    if order("hold", place) == count:
        (directory() / f"held-{who}").touch()
        while order("hold", place):
            time.sleep(0.02)


@cache  # once a process
def show_requests(calls):
    """Leave a file ``asks-DOING`` just before each request to Ray that a driver makes from here on."""
    run = calls.run

    def shown(self, doing, *more, **named):
        (directory() / f"asks-{doing}").touch()
        return run(self, doing, *more, **named)

    calls.run = shown
