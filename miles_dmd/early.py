"""Signal handlers for the time while Python imports: the process ends in one line."""

import os
import signal


def stand_by(program: str) -> None:
    """Until ``signals.listening`` takes over, and after it: nothing has been started that could be left behind."""

    def leave(number: int, frame: object) -> None:
        # an exception would come up in the middle of an import, and some of those swallow it
        os.write(2, f"{program}: stopped by {signal.Signals(number).name}\n".encode())
        os._exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)
