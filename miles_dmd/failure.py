"""Failure report: one line on the console, the traceback in failure.log."""

from __future__ import annotations

import signal
import tempfile
import traceback
from pathlib import Path

from miles_dmd.checkpoint.store import FOLDER, run_directory, whole_checkpoints
from miles_dmd.errors import ConfigError, SaveError
from miles_dmd.preflight.run_directory import FAILURE_LOG
from miles_dmd.streams import OutputError, say


def report_failure(
    program: str,
    error: BaseException,
    began: bool,
    directory: Path | None,
    checkpoint: Path | None,
    *,
    signal_number: int | None = None,
) -> int:
    """Print on standard error why the run ended, once and in one line. Returns the exit code: 128 + n where signal n
    ended it, 2 for a refusal before it had begun, 1 for any other end."""
    # whatever the error: who signals a whole group of processes has ended some that this one waited for
    if signal_number is not None and not isinstance(error, SaveError):
        message, code = describe_stop(signal_number, directory, checkpoint), 128 + signal_number
    elif isinstance(error, OutputError):
        if error.reader_gone and not began:
            return 0
        message, code = str(error), 1
    elif isinstance(error, ConfigError) and not began:
        message, code = f"error: {' '.join(str(error).split())}", 2
    else:
        message, code = describe_failure(error, directory, checkpoint), 1
    say(f"{program}: {message}")
    return code


def one_line(error: BaseException) -> str:
    """``ClusterError: critic rank 1 failed while training: ...``; in one process, who and where are notes."""
    where = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {' '.join(f'{error}{where}'.split())}"


def write_traceback(error: BaseException, directory: Path | None) -> Path:
    """The traceback with its causes into ``directory``, the run's; a run that has none yet gets a temporary one."""
    if directory is None:
        directory = Path(tempfile.mkdtemp(prefix="miles_dmd-failure-"))
    path = directory / FAILURE_LOG
    directory.mkdir(parents=True, exist_ok=True)
    # a path may hold bytes that are no text
    path.write_text("".join(traceback.format_exception(error)), encoding="utf-8", errors="backslashreplace")
    return path


def describe_failure(error: BaseException, directory: Path | None, checkpoint: Path | None) -> str:
    """The error, the checkpoint to go on from, and the place of the traceback, in one line."""
    parts = [one_line(error)]
    if checkpoint is not None:
        parts.append(f"go on with {flags_of(checkpoint, directory)}")
    try:
        parts.append(f"traceback in {write_traceback(error, directory)}")
    except OSError as full:
        parts.append(f"no traceback: {full.strerror}")
    return "; ".join(parts)


def describe_stop(number: int, directory: Path | None, checkpoint: Path | None) -> str:
    """The checkpoint that is left of a run that signal ``number`` ended, in one line."""
    left = f"go on with {flags_of(checkpoint, directory)}" if checkpoint else "it has no checkpoint"
    return f"stopped by {signal.Signals(number).name}; {left}"


def flags_of(checkpoint: Path, directory: Path | None) -> str:
    """Flags that go on from ``checkpoint``, in ``directory`` if it is that run's own."""
    own = directory is not None and run_directory(checkpoint) == directory
    return f"--load {checkpoint} --save {directory}" if own else f"--load {checkpoint}"


def last_checkpoint(directory: Path) -> Path | None:
    """The newest whole checkpoint of the run in ``directory``, if it has one."""
    found = whole_checkpoints(directory / FOLDER)
    return found[-1] if found else None
