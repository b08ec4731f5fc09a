"""What does a signal do before anybody listens? While Python imports, it ends the process in one line."""

import os
import signal
import sys


def stand_by() -> None:
    """Until ``signals.listening`` takes over, and after it: nothing has been started that could be left behind."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)


def _leave(number: int, frame: object) -> None:
    # an exception would come up in the middle of an import, and some of those swallow it
    program = os.path.basename(sys.argv[0])
    os.write(2, f"{program}: stopped by {signal.Signals(number).name}\n".encode())
    os._exit(128 + number)
