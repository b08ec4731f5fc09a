"""Run directories: creation, locking, --overwrite."""

import contextlib
import itertools
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from miles_dmd.checkpoint.store import find_checkpoint, run_directory
from miles_dmd.config.args import Args
from miles_dmd.config.values import flag_name, kinds
from miles_dmd.errors import ConfigError
from miles_dmd.files import digests, remove_temporaries, remove_tree
from miles_dmd.locks import leads_to, lock
from miles_dmd.observe.metrics import KIND

logger = logging.getLogger(__name__)

FAILURE_LOG = "failure.log"
A_DAY = 24 * 3600.0
ENTRIES = (
    "student", "student.partial", "student.old", "student_best", "student_best.new", "student_best.new.partial",
    "student_best.old", "metrics.jsonl", "summary.json", "samples", "curves.png", "trace.json", "tensorboard", "wandb",
    "checkpoints", FAILURE_LOG,
)  # fmt: skip
"""Names that a run leaves; a directory that holds one of them is a run's, and --overwrite removes these only."""


def holds_run(directory: Path) -> bool:
    """The log alone is of a run that failed before it had begun, which is no reason not to begin."""
    return any((directory / name).exists() for name in ENTRIES if name != FAILURE_LOG)


def is_ours(directory: Path) -> bool:
    """True if a run wrote the directory: its metrics say so in their first line."""
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
    for options in (args.loss_options, args.engine_options, args.modality_options):
        for name, kind in kinds(type(options)).items():
            if kind.path is not None and kind.path.read and isinstance(value := getattr(options, name), str):
                yield flag_name(name), Path(value).resolve()


def preset_name(args: Args) -> str:
    """Name of a run without --save: its preset, or its loss type."""
    return Path(args.config).stem if args.config else args.loss_type.rpartition(".")[2]


def fresh_run_directory(root: Path, preset: str) -> Path:
    """Makes and returns ``root/<preset>-<n>`` for the least free n. Two runs that start at once never get the same."""
    for number in itertools.count(1):
        directory = root / f"{preset}-{number}"
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"{root} cannot be used: {error.strerror}; name a directory by --save") from error
        return directory
    raise AssertionError("count() has no end")


@contextlib.contextmanager
def own_directory(args: Args) -> Iterator[Path]:
    """The directory that the run may write to, ``--save`` or a fresh one, for nobody else until the block ends.

    What is in it stays as it is (``clear`` makes room), and a directory that is empty at the end is gone if it was made
    here. Raises ConfigError where --save holds another run, or another run is at work in it.
    """
    check_save(args)
    wanted = Path(args.save) if args.save is not None else Path("runs")
    missing = [path for path in (wanted, *wanted.parents) if not path.exists()]
    directory = wanted if args.save is not None else fresh_run_directory(wanted, preset_name(args))
    made = missing if args.save is not None else [directory, *missing]
    with occupied(directory):
        check_save(args)  # again: a run that was at work a moment ago may have left something
        try:
            yield directory
        finally:
            _remove_empty(made)


def clear(args: Args, directory: Path) -> None:
    """Remove an older run from ``directory``, which is this run's; not the one that --load goes on from. Also what
    processes that were killed while they wrote a file have left, there and in the cache."""
    for name in () if continues(args) else ENTRIES:
        _remove(directory / name)
    for folder in (directory, directory / "samples"):
        remove_temporaries(folder)
    for folder in (Path(args.cache_dir).expanduser(), digests(args.cache_dir)):
        remove_temporaries(folder, older_than=A_DAY)


@contextlib.contextmanager
def occupied(directory: Path) -> Iterator[None]:
    """``directory`` belongs to this process until the block ends, or the process does; it is made if it is not there.
    Raises ConfigError.

    A lock on the directory itself: two runs that go on from one checkpoint would write over each other.
    """
    descriptor = _locked(directory)
    while not leads_to(directory, descriptor):  # its last owner left nothing in it, and removed it
        os.close(descriptor)
        descriptor = _locked(directory)
    try:
        yield
    finally:
        os.close(descriptor)


def _locked(directory: Path) -> int:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"--save {directory} cannot be used: {error.strerror}; name another directory") from error
    try:
        if not lock(descriptor):
            os.close(descriptor)
            raise ConfigError(f"--save {directory}: another run writes to it; end that one, or name another")
    except OSError as error:  # a file system without locks
        logger.warning("%s cannot be locked against a second run (%s)", directory, error.strerror)
    return descriptor


def _remove_empty(directories: Iterable[Path]) -> None:
    for directory in directories:
        try:
            directory.rmdir()
        except OSError:  # something is in it
            return


def continues(args: Args) -> bool:
    """True if --save is the very run that --load goes on from. Raises CheckpointError where --load means nothing."""
    if args.load is None or args.save is None:
        return False
    return run_directory(find_checkpoint(args.load, args.save)) == Path(args.save).resolve()


def check_save(args: Args) -> None:
    """Raises ConfigError where --save cannot be written to, or holds a run that nobody asked to replace."""
    if args.save is None:
        return
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
        remove_tree(path)
    else:
        path.unlink(missing_ok=True)
