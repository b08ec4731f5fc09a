"""Checks before the package is imported: Python version, open streams, signal handlers that end in one line."""

from __future__ import annotations

import os
import signal
import sys

from miles_dmd.streams import open_closed_streams, say, say_at_once

OLDEST = (3, 11)
SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
"""Signals that stop a run: a terminal that closes, Ctrl-C, and whoever ends a job."""


def prepare_process(program: str) -> None:
    """Until ``signals.listening`` takes over, and after it, a signal ends the process in one line: nothing has been
    started that could be left behind. Exits with 2 under a Python that is too old.
    """
    open_closed_streams()
    if sys.version_info < OLDEST:  # this file and ``streams`` keep to what older ones can read
        here = ".".join(map(str, sys.version_info[:3]))
        say(f"{program}: error: Python {here} is too old; make the environment with Python 3.11 or newer")
        sys.exit(2)

    def leave(number: int, frame: object) -> None:
        # an exception would come up in the middle of an import, and some of those swallow it
        say_at_once(f"{program}: stopped by {signal.Signals(number).name}")
        os._exit(128 + number)

    for number in handled_signals():
        signal.signal(number, leave)


def handled_signals() -> tuple[signal.Signals, ...]:
    """The SIGNALS that the parent did not set to ignored, as ``nohup`` does, and a shell for ``command &`` in a
    script: they stay so."""
    return tuple(number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN)
