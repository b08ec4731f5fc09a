"""``miles-dmd``: what one does with a run's files when no run is on. Training is ``train_diffusion.py``.

miles-dmd checkpoint inspect DIR [--verify]
"""

import argparse
import sys
from collections.abc import Sequence

from miles_dmd.checkpoint.inspect import inspect
from miles_dmd.errors import MilesDmdError
from miles_dmd.version import VERSION


def main(argv: Sequence[str] | None = None) -> int:
    """0: done; 2: refused, in one line."""
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
    try:
        print(inspect(given.directory, verify=given.verify))
    except MilesDmdError as error:
        print(f"miles-dmd: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
