"""Metric trackers: JSONL always, TensorBoard and Weights & Biases on request."""

import contextlib
import os
import secrets
import time
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from miles_dmd.errors import ConfigError
from miles_dmd.files import atomic_write_text
from miles_dmd.observe.best_effort import BestEffort
from miles_dmd.observe.metrics import MetricsWriter


class Tracker(Protocol):
    """``write`` gets a row with the whole number ``cycle`` and named numbers; nothing comes after ``close``."""

    def write(self, row: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorboardTracker:
    """Event files under ``directory``, over cycles; those after ``done`` that an earlier run left there are dropped.

    Raises ConfigError where tensorboard is not installed. torch's SummaryWriter writes from a thread of its own, which
    prints a traceback when the disk is full; and the driver of a Ray run knows no torch.
    """

    def __init__(self, directory: str | Path, done: int = 0) -> None:
        check_installed(tensorboard=True)
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        directory = Path(directory)
        again = directory.is_dir() and any(directory.iterdir())
        directory.mkdir(parents=True, exist_ok=True)
        # readers take files in the order of their names
        self._file = (directory / f"events.out.tfevents.{time.time():.6f}.{os.getpid()}").open("xb")
        self._records, self._event = RecordWriter(self._file), Event
        self._add(file_version="brain.Event:2")
        if again:  # what TensorBoard takes for "later steps than this one are void"
            self._add(step=done + 1, session_log=SessionLog(status=SessionLog.START))
        self._file.flush()

    def write(self, row: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in row.items()]
        try:
            self._add(step=int(row["cycle"]), summary=Summary(value=values))
            self._file.flush()
        except OSError:
            with contextlib.suppress(OSError):  # its buffer is lost, and nobody closes a tracker that has failed
                self._file.close()
            raise

    def _add(self, **content: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **content).SerializeToString())

    def close(self) -> None:
        self._file.close()


class WandbTracker:
    """A run of ``project``, over cycles; ``config`` is shown beside it. Raises ConfigError without wandb.

    A run that goes on in its own directory goes on in W&B: its name there is kept in ``directory``, and cycles that W&B
    has already are not sent again.
    """

    def __init__(self, project: str, directory: str | Path, config: Mapping[str, Any]) -> None:
        check_installed(wandb_project=project)
        wandb = import_module("wandb")
        directory, identity = Path(directory), Path(directory) / "wandb" / "run_id"
        known = identity.read_text(encoding="utf-8").strip() if identity.is_file() else secrets.token_hex(8)
        self._run = wandb.init(
            project=project, dir=str(directory), name=directory.name, config=dict(config), id=known, resume="allow"
        )
        atomic_write_text(identity, known + "\n")

    def write(self, row: Mapping[str, float]) -> None:
        if int(row["cycle"]) >= self._run.step:
            self._run.log(dict(row), step=int(row["cycle"]))

    def close(self) -> None:
        self._run.finish()


class Droppable:
    """``tracker``, without which the run goes on once it has failed."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._tracker, self._attempt = tracker, BestEffort(name)

    def write(self, row: Mapping[str, float]) -> None:
        self._attempt(lambda: self._tracker.write(row))

    def close(self) -> None:
        self._attempt(self._tracker.close)


class Trackers:
    """``rows``, which are data, and trackers that repeat them."""

    def __init__(self, rows: MetricsWriter, *others: Tracker) -> None:
        self.rows, self._others = rows, others

    def write(self, row: Mapping[str, float]) -> None:
        for tracker in (self.rows, *self._others):
            tracker.write(row)

    def close(self) -> None:
        """Raises OSError where rows are lost."""
        for tracker in (*self._others, self.rows):
            tracker.close()


def open_trackers(
    directory: str | Path,
    *,
    tensorboard: bool = False,
    wandb_project: str | None = None,
    config: Mapping[str, Any] | None = None,
    done: int = 0,
) -> Trackers:
    """``directory``/metrics.jsonl, and what was asked for besides; ``done`` cycles are committed before.

    Raises ConfigError before anything is written. One that is asked for and cannot begin is an error; one that fails
    later is dropped with a warning.
    """
    check_installed(tensorboard=tensorboard, wandb_project=wandb_project)
    rows, others = MetricsWriter(Path(directory) / "metrics.jsonl"), []
    if tensorboard:
        others.append(Droppable("--tensorboard", TensorboardTracker(Path(directory) / "tensorboard", done)))
    if wandb_project is not None:
        others.append(Droppable("--wandb-project", WandbTracker(wandb_project, directory, config or {})))
    return Trackers(rows, *others)


def check_installed(*, tensorboard: bool = False, wandb_project: str | None = None) -> None:
    """Raises ConfigError, naming the flag and the extra to install, for a tracker that is asked for and not there."""
    if tensorboard and find_spec("tensorboard") is None:
        raise ConfigError("--tensorboard: tensorboard is not installed; pip install 'miles-dmd[tensorboard]'")
    if wandb_project is not None and find_spec("wandb") is None:
        raise ConfigError(f"--wandb-project {wandb_project}: wandb is not installed; pip install 'miles-dmd[wandb]'")
