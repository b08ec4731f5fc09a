"""The ``miles-dmd`` command: inspect checkpoints. Training is ``train_diffusion.py``.

miles-dmd checkpoint inspect DIR [--verify]
"""

import os
import sys
from collections.abc import Sequence

from miles_dmd.early import stand_by
from miles_dmd.errors import MilesDmdError


def main(argv: Sequence[str] | None = None) -> int:
    """0: done; 1: a file cannot be read; 2: refused; 130: stopped. Each but the first in one line."""
    try:
        return _inspect(argv)
    except MilesDmdError as error:
        said, code = f"error: {error}", 2
    except BrokenPipeError:  # who reads has seen enough
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # or Python would try once more at its end, and say so
        return 0
    except OSError as error:
        said, code = f"{error.filename or 'a file'} cannot be read: {error.strerror}", 1
    except KeyboardInterrupt:
        said, code = "stopped by SIGINT", 130
    print(f"miles-dmd: {said}", file=sys.stderr)
    return code


def _inspect(argv: Sequence[str] | None) -> int:
    import argparse

    from miles_dmd.checkpoint.inspect import inspect
    from miles_dmd.version import VERSION

    parser = argparse.ArgumentParser("miles-dmd", description="Look at what a run left.")
    parser.add_argument("--version", action="version", version=VERSION)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    checkpoint = commands.add_parser("checkpoint", help="whole-run checkpoints").add_subparsers(
        required=True, metavar="COMMAND"
    )
    shown = checkpoint.add_parser("inspect", help="print a manifest, and whether all of its files are there")
    shown.add_argument("directory", metavar="DIR", help="a checkpoint, or a run's directory: its newest")
    shown.add_argument("--verify", action="store_true", help="compute the checksum of every file")
    given = parser.parse_args(argv)
    print(inspect(given.directory, verify=given.verify), flush=True)
    return 0


if __name__ == "__main__":
    stand_by("miles-dmd")
    sys.exit(main())
