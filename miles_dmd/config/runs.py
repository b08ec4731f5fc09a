"""Where a run leaves its files: a directory that no other run has."""

import contextlib
import fcntl
import itertools
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from miles_dmd.checkpoint.store import find_checkpoint, run_directory
from miles_dmd.config.args import Args
from miles_dmd.errors import ConfigError
from miles_dmd.observe.metrics import KIND

logger = logging.getLogger(__name__)

ENTRIES = (
    "student", "student_best", "metrics.jsonl", "summary.json", "samples", "curves.png", "trace.json", "tensorboard",
    "checkpoints", "failure.log",
)  # fmt: skip
"""What a run leaves; a directory that holds one of them is a run's, and --overwrite removes these only."""


def holds_run(directory: Path) -> bool:
    return any((directory / name).exists() for name in ENTRIES)


def is_ours(directory: Path) -> bool:
    """Whether what lies there was written by a run: its metrics say so in their first line."""
    try:
        with (directory / "metrics.jsonl").open("rb") as file:
            return KIND.encode() in file.readline(200)
    except OSError:
        return False


def inputs(args: Args) -> Iterator[tuple[str, Path]]:
    """(flag, path) of everything that a run reads."""
    for name in ("hf_checkpoint", "teacher_checkpoint", "prompt_data", "config"):
        if (value := getattr(args, name)) is not None:
            yield f"--{name.replace('_', '-')}", Path(value).resolve()
    for trainer in args.trainers:
        for name in trainer.overrides.keys() & {"hf_checkpoint", "teacher_checkpoint"}:
            yield f"--{trainer.role}-{name.replace('_', '-')}", Path(trainer.overrides[name]).resolve()


def preset_name(args: Args) -> str:
    """What a run without --save is called after: its preset, or its loss type."""
    return Path(args.config).stem if args.config else args.loss_type.rpartition(".")[2]


def fresh_run_directory(root: Path, preset: str) -> Path:
    """Makes and returns ``root/<preset>-<n>`` for the least free n. Two runs that start at once never get the same."""
    root.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        directory = root / f"{preset}-{number}"
        try:
            directory.mkdir()
        except FileExistsError:
            continue
        return directory
    raise AssertionError("count() has no end")


def claim_run_directory(args: Args) -> Path:
    """The directory that the run may write to: ``--save``, emptied of an older run with --overwrite, or a fresh one;
    left as it is where --load goes on from a checkpoint in it.

    Raises ConfigError where --save holds another run.
    """
    if args.save is None:
        return fresh_run_directory(Path("runs"), preset_name(args))
    check_save(args)
    directory = Path(args.save)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--save {args.save} cannot be made: {error.strerror}; name another directory") from error
    with occupied(directory):
        for name in () if continues(args) else ENTRIES:
            _remove(directory / name)
    return directory


@contextlib.contextmanager
def occupied(directory: Path) -> Iterator[None]:
    """``directory`` belongs to this process until the block ends, or the process does. Raises ConfigError.

    A lock on the directory itself: two runs that go on from one checkpoint would write over each other.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"--save {directory}: another run writes to it; end that one, or name another") from None
    except OSError as error:  # a file system without locks
        logger.warning("%s cannot be locked against a second run (%s)", directory, error.strerror)
    try:
        yield
    finally:
        os.close(descriptor)


def continues(args: Args) -> bool:
    """Whether --save is the very run that --load goes on from. Raises CheckpointError where --load means nothing."""
    if args.load is None or args.save is None:
        return False
    return run_directory(find_checkpoint(args.load, args.save)) == Path(args.save).resolve()


def check_save(args: Args) -> None:
    """Raises ConfigError where --save cannot be written to, or holds a run that nobody asked to replace."""
    if args.save is None:
        return
    if not args.save:
        raise ConfigError("--save is empty; name a directory, or leave it out for a fresh runs/<preset>-<n>")
    directory = Path(args.save)
    _check_beside_inputs(args, directory.resolve())
    nearest = next(path for path in (directory, *directory.resolve().parents) if path.exists())
    if not nearest.is_dir():
        raise ConfigError(f"--save {args.save}: {nearest} is a file; name a directory")
    if continues(args):
        if args.overwrite:
            raise ConfigError(
                f"--overwrite would remove the run that --load {args.load} goes on from; drop it, or name another "
                "--save"
            )
    elif holds_run(directory) and not args.overwrite:
        raise ConfigError(
            f"--save {args.save} holds another run, or files of the same names; replace it with --overwrite, go on "
            "with it by --load latest, or name another directory"
        )

    elif holds_run(directory) and not is_ours(directory):
        raise ConfigError(
            f"--overwrite: {args.save} holds files that no run wrote there (it has no metrics.jsonl of ours); remove "
            "them yourself, or name another directory"
        )


def _check_beside_inputs(args: Args, directory: Path) -> None:
    """A run neither writes into what it reads, nor removes it."""
    for flag, path in inputs(args):
        if path.is_dir() and (directory == path or path in directory.parents):
            raise ConfigError(f"--save {args.save} lies in {flag} {path}; name a directory outside of it")
        if directory in path.parents and path.relative_to(directory).parts[0] in ENTRIES and args.overwrite:
            raise ConfigError(f"--overwrite would remove {flag} {path}; name another --save")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
