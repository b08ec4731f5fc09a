"""``sglang serve`` launcher, also for CPUs, that ends with the process that started it.

    python -m miles_dmd_sglang.serve ARGS

The server's workers are spawned, which imports this module again in each of them: so what torch lacks is patched here,
at import, and not in main.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from importlib.metadata import version

from miles_dmd_sglang import without_cuda

without_cuda.prepare()

DIE_WITH_STDIN = "--die-with-stdin"
GRACE = 5.0
"""Seconds between asking the process group to end and ending it."""


def die_with_stdin() -> None:
    """End this process group when standard input closes: whoever held its other end is gone, however it went."""
    # a run blocks them for its processes, which is inherited, and this group is asked by the second to end
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    stdin = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # nothing else may read it, nor hand it to a child
    os.set_inheritable(stdin, False)

    def watch() -> None:
        while os.read(stdin, 4096):
            pass
        os.killpg(0, signal.SIGTERM)
        time.sleep(GRACE)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="die with stdin", daemon=True).start()


def known_flags(argv: list[str]) -> list[str]:
    """Without the flag that 0.5.22 does not have, where an idle server keeps a core busy."""
    old = tuple(map(int, version("sglang").split(".")[:3])) < (0, 5, 23)
    return [word for word in argv if not (old and word == "--sleep-on-idle")]


def main(argv: list[str]) -> None:
    if DIE_WITH_STDIN in argv:
        argv = [word for word in argv if word != DIE_WITH_STDIN]
        die_with_stdin()
    from sglang.cli.main import main as sglang

    sys.argv = ["sglang", "serve", *known_flags(argv)]
    sglang()


if __name__ == "__main__":
    main(sys.argv[1:])
