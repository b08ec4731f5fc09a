"""What does a signal do before anybody listens? While Python imports, it ends the process in one line."""

import os
import signal


def stand_by(program: str) -> None:
    """Until ``signals.listening`` takes over, and after it: nothing has been started that could be left behind."""

    def leave(number: int, frame: object) -> None:
        # an exception would come up in the middle of an import, and some of those swallow it
        try:
            os.write(2, f"{program}: stopped by {signal.Signals(number).name}\n".encode())
        finally:  # also where nobody can read it
            os._exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)
