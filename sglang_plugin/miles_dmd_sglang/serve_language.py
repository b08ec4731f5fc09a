"""Launcher of SGLang's language-model server, also for CPUs, that ends with the process that started it.

    python -m miles_dmd_sglang.serve_language ARGS

Spawned workers import this module again: what is missing on a CPU is there before they import sglang.
"""

from __future__ import annotations

import os
import sys

from miles_dmd_sglang import kernels, without_cuda
from miles_dmd_sglang.serve import DIE_WITH_STDIN, die_with_stdin

without_cuda.prepare()
kernels.prepare()


def main(argv: list[str]) -> None:
    if DIE_WITH_STDIN in argv:
        argv = [word for word in argv if word != DIE_WITH_STDIN]
        die_with_stdin()
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(prepare_server_args(argv))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
