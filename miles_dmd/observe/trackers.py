"""Metric trackers: JSONL always, TensorBoard and Weights & Biases on request."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from miles_dmd.errors import ConfigError
from miles_dmd.observe.metrics import MetricsWriter


class Tracker(Protocol):
    """``write`` gets a row with the whole number ``cycle`` and named numbers; nothing comes after ``close``."""

    def write(self, row: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorboardTracker:
    """Event files under ``directory``, over cycles. Raises ConfigError where tensorboard is not installed."""

    def __init__(self, directory: str | Path) -> None:
        check_installed(tensorboard=True)
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory))

    def write(self, row: Mapping[str, float]) -> None:
        for name, value in row.items():
            self._writer.add_scalar(name, value, global_step=int(row["cycle"]))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A run of ``project``, over cycles; ``config`` is shown beside it. Raises ConfigError without wandb."""

    def __init__(self, project: str, directory: str | Path, config: Mapping[str, Any]) -> None:
        check_installed(wandb_project=project)
        wandb = import_module("wandb")
        self._run = wandb.init(project=project, dir=str(directory), name=Path(directory).name, config=dict(config))

    def write(self, row: Mapping[str, float]) -> None:
        self._run.log(dict(row), step=int(row["cycle"]))

    def close(self) -> None:
        self._run.finish()


class Trackers:
    """Several trackers as one."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def write(self, row: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.write(row)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def open_trackers(
    directory: str | Path,
    *,
    tensorboard: bool = False,
    wandb_project: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> Trackers:
    """``directory``/metrics.jsonl, and what was asked for besides. Raises ConfigError before anything is written."""
    check_installed(tensorboard=tensorboard, wandb_project=wandb_project)
    trackers: list[Tracker] = [MetricsWriter(Path(directory) / "metrics.jsonl")]
    if tensorboard:
        trackers.append(TensorboardTracker(Path(directory) / "tensorboard"))
    if wandb_project is not None:
        trackers.append(WandbTracker(wandb_project, directory, config or {}))
    return Trackers(trackers)


def check_installed(*, tensorboard: bool = False, wandb_project: str | None = None) -> None:
    """Raises ConfigError, naming the flag and the extra to install, for a tracker that is asked for and not there."""
    if tensorboard and find_spec("tensorboard") is None:
        raise ConfigError("--tensorboard: tensorboard is not installed; pip install 'miles-dmd[tensorboard]'")
    if wandb_project is not None and find_spec("wandb") is None:
        raise ConfigError(f"--wandb-project {wandb_project}: wandb is not installed; pip install 'miles-dmd[wandb]'")
