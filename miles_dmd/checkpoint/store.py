"""Checkpoint directories: staging, atomic rename, ``latest`` pointer, removal of old ones.

DIR/checkpoints/.cycle_000012.4711.tmp/   being written; of no interest to anybody
DIR/checkpoints/cycle_000012/             whole: it has a manifest.json, which was written last
DIR/checkpoints/latest                    the name of the newest one, for people and scripts
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from miles_dmd.checkpoint import manifest
from miles_dmd.errors import CheckpointError
from miles_dmd.files import atomic_write_text, fsync_path, remove_temporaries, remove_tree, temporary_beside

logger = logging.getLogger(__name__)

FOLDER = "checkpoints"
POINTER = "latest"
LATEST = "latest"
"""Value of --load for the newest checkpoint of --save."""
_NAME = re.compile(r"cycle_(\d{6,})")


class CheckpointStore:
    """The checkpoints of one run, which alone writes to ``directory``; the ``keep`` newest stay, 0 for all.

    ``warn`` is told what could not be tidied up after a checkpoint that is written.
    """

    def __init__(self, directory: Path, keep: int = 0, warn: Callable[[str], None] = logger.warning) -> None:
        self.directory, self.keep, self.warn = directory, keep, warn

    @contextlib.contextmanager
    def writing(self, cycle: int) -> Iterator[Path]:
        """A directory to write checkpoint ``cycle`` into, its manifest last. It is published when the block ends well,
        and gone when it does not. Raises OSError if it is not published; FileExistsError for a cycle that has a
        checkpoint."""
        target = self.directory / name_of(cycle)
        if target.exists():
            raise FileExistsError(f"{target} exists, and a checkpoint is never overwritten")
        self.directory.mkdir(parents=True, exist_ok=True)
        remove_temporaries(self.directory)  # what a killed process left
        staging = temporary_beside(target)
        staging.mkdir()
        try:
            yield staging
            _require_manifest(staging)
            for folder in (staging, *(path for path in staging.rglob("*") if path.is_dir())):
                fsync_path(folder)
            staging.rename(target)  # refused by the system where ``target`` has appeared with something in it
        finally:
            with contextlib.suppress(OSError):
                remove_tree(staging)
        try:
            self._tidy(target)
        except OSError as error:  # it is there all the same, and a second one would not be written
            reason = f"{error.strerror or error}: {error.filename or self.directory}"
            self.warn(f"{target} is written and whole, but not everything beside it is in order ({reason})")

    def _tidy(self, newest: Path) -> None:
        fsync_path(self.directory)  # before older ones go
        try:
            atomic_write_text(self.directory / POINTER, newest.name + "\n")
        finally:
            self._prune()  # it makes room, which the pointer may have lacked

    def whole(self) -> list[Path]:
        """Whole checkpoints, oldest first."""
        return whole_checkpoints(self.directory)

    def _prune(self) -> None:
        for path in self.whole()[: -self.keep] if self.keep else ():
            trash = temporary_beside(path)
            path.rename(trash)  # at once, so that nobody finds a half of it
            remove_tree(trash)


def name_of(cycle: int) -> str:
    return f"cycle_{cycle:06d}"


def cycle_of(checkpoint: Path) -> int:
    """Cycle of a directory that ``name_of`` named."""
    match = _NAME.fullmatch(checkpoint.name)
    assert match is not None, checkpoint
    return int(match[1])


def whole_checkpoints(directory: Path) -> list[Path]:
    """Checkpoints in a ``checkpoints`` folder that have a manifest, oldest first."""
    if not directory.is_dir():
        return []
    found = ((match, path) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name)))
    numbered = [(int(match[1]), path) for match, path in found if (path / manifest.NAME).is_file()]
    return [path for _, path in sorted(numbered)]


def checkpoint_before(checkpoint: Path) -> Path | None:
    """The newest whole one beside ``checkpoint`` that is older; None where there is none."""
    if not _NAME.fullmatch(checkpoint.name):  # it has been carried elsewhere
        return None
    older = [path for path in whole_checkpoints(checkpoint.parent) if cycle_of(path) < cycle_of(checkpoint)]
    return older[-1] if older else None


def find_checkpoint(load: str, save: str | None) -> Path:
    """The checkpoint that ``--load`` means: one itself, or the newest of a run or of a ``checkpoints`` folder.

    The pointer is not asked: a process that dies between rename and pointer leaves it one behind. Raises
    CheckpointError.
    """
    if load == LATEST and save is None:
        raise CheckpointError(
            "means the newest checkpoint of --save, which is not given; name --save DIR, such as runs/digits-1"
        )
    directory = Path(save or "") if load == LATEST else Path(load).expanduser()
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is no directory; name a run's, its {FOLDER} folder, or one checkpoint")
    if (directory / manifest.NAME).exists() or _NAME.fullmatch(directory.name):
        _require_manifest(directory)
        return directory
    found = whole_checkpoints(directory / FOLDER) or whole_checkpoints(directory)
    if not found:
        raise CheckpointError(f"{directory} holds no whole checkpoint; name a run that has saved one")
    return found[-1]


def run_directory(checkpoint: Path) -> Path | None:
    """The --save that ``checkpoint`` was written by; None for one that has been carried elsewhere."""
    folder = checkpoint.resolve().parent
    return folder.parent if folder.name == FOLDER else None


def _require_manifest(directory: Path) -> None:
    if not (directory / manifest.NAME).exists():
        raise CheckpointError(f"{directory} has no {manifest.NAME}: it is no whole checkpoint")
