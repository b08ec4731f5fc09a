"""How does a run that failed, or was stopped, say so? One line on the console; a failure's traceback in a file."""

from __future__ import annotations

import signal
import tempfile
import traceback
from pathlib import Path

from miles_dmd.checkpoint.store import FOLDER, whole_checkpoints

LOG = "failure.log"


def one_line(error: BaseException) -> str:
    """``ClusterError: critic rank 1 failed while training: ...``"""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def write_traceback(error: BaseException, directory: Path | None) -> Path:
    """The traceback with its causes into ``directory``, the run's; a run that has none yet gets a temporary one."""
    if directory is None:
        directory = Path(tempfile.mkdtemp(prefix="miles_dmd-failure-"))
    path = directory / LOG
    path.write_text("".join(traceback.format_exception(error)))
    return path


def told(error: BaseException, directory: Path | None) -> str:
    """What happened, where to go on from, and where more stands, in one line."""
    parts = [one_line(error)]
    if checkpoint := last_checkpoint(directory):
        parts.append(f"go on with --load {checkpoint}")
    try:
        parts.append(f"traceback in {write_traceback(error, directory)}")
    except OSError as full:
        parts.append(f"no traceback: {full.strerror}")
    return "; ".join(parts)


def stopped(number: int, directory: Path | None) -> str:
    """What is left of a run that signal ``number`` ended, in one line."""
    checkpoint = last_checkpoint(directory)
    left = f"go on with --load {checkpoint}" if checkpoint else "it has no checkpoint"
    return f"stopped by {signal.Signals(number).name}; {left}"


def last_checkpoint(directory: Path | None) -> Path | None:
    """The newest whole checkpoint of the run in ``directory``, if it has one."""
    found = whole_checkpoints(directory / FOLDER) if directory is not None else []
    return found[-1] if found else None
