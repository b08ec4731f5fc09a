"""The ``miles-dmd`` command: train, and inspect checkpoints; also ``python -m miles_dmd``.

miles-dmd train [flags]                          the same as python train_diffusion.py
miles-dmd checkpoint inspect DIR [--verify]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from miles_dmd.early import prepare_process
from miles_dmd.streams import OutputError, leave, say, show

PROGRAM = "miles-dmd"


def main(argv: Sequence[str] | None = None) -> int:
    """0: done; 1: the output cannot be written; 2: refused; 130: stopped. Each but the first in one
    line. What ``train`` returns stands at ``miles_dmd.run.main``."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["train"]:
        from miles_dmd.run import main as train

        return train(words[1:], program=f"{PROGRAM} train")
    return _look(words)


def _look(words: Sequence[str]) -> int:
    from miles_dmd.errors import MilesDmdError

    try:
        return _inspect(words)
    except MilesDmdError as error:
        message, code = f"error: {error}", 2
    except OutputError as error:
        message, code = str(error), 1
        if error.reader_gone:
            return 0
    except OSError as error:
        message, code = f"error: {error.filename or 'a file'} cannot be read: {error.strerror}; name another", 2
    except KeyboardInterrupt:
        message, code = "stopped by SIGINT", 130
    say(f"{PROGRAM}: {message}")
    return code


def _inspect(words: Sequence[str]) -> int:
    import argparse

    from miles_dmd.checkpoint.inspect import inspect
    from miles_dmd.errors import ConfigError
    from miles_dmd.registry import nearest
    from miles_dmd.version import VERSION

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            wrong = next((word for word in words if f"{word!r} (choose from" in message), "")
            hint = nearest(wrong, ("train", "checkpoint", "inspect")) if wrong else ""
            raise ConfigError(f"{message.removeprefix('argument ')}{hint}; `{self.prog} --help` shows what it takes")

    parser = Parser(PROGRAM, description="Train, and look at what a run left.")
    parser.add_argument("--version", action="version", version=VERSION)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("train", add_help=False, help="distil a model; `miles-dmd train --help` lists the flags")
    checkpoint = commands.add_parser("checkpoint", help="whole-run checkpoints").add_subparsers(
        required=True, metavar="COMMAND"
    )
    shown = checkpoint.add_parser("inspect", help="print a manifest, and whether all of its files are there")
    shown.add_argument("directory", metavar="DIR", help="a checkpoint, or a run's directory: its newest")
    shown.add_argument("--verify", action="store_true", help="compute the checksum of every file")
    given = parser.parse_args(words)
    show(inspect(given.directory, verify=given.verify))
    return 0


def command() -> None:
    """The installed program."""
    prepare_process(PROGRAM)
    try:
        status: int | str | None = main()
    except SystemExit as shown:  # of argparse: --help, --version, words that it does not know
        status = shown.code
    leave(PROGRAM, status)


if __name__ == "__main__":
    command()
