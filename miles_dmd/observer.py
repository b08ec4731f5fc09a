"""Observer of committed cycles: it writes the row of metrics, then the best student, then the checkpoint of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from miles_dmd.errors import Unanswered
from miles_dmd.executor import GroupExecutor
from miles_dmd.observe.best_effort import BestEffort
from miles_dmd.plan import TrainerCounters
from miles_dmd.run_logger import RunLogger
from miles_dmd.saving import CheckpointSaver
from miles_dmd.students import KeepBest


@dataclass(frozen=True, slots=True)
class CommitObserver:
    """The controller's ``observer`` and ``rescue``."""

    logger: RunLogger
    best: KeepBest
    saver: CheckpointSaver
    executor: GroupExecutor

    def committed(self, counters: TrainerCounters, metrics: Mapping[str, Any]) -> None:
        row = self.logger.committed(counters, metrics)
        self.best.committed(row, self.executor)
        self.saver.committed(counters)

    def rescue(self, error: BaseException, counters: TrainerCounters, metrics: Mapping[str, Any]) -> bool:
        """Save the committed cycle of a run that a hook or an observer ends; True if it is saved."""
        if isinstance(error, Unanswered):
            return False
        if self.logger.logged < counters.completed_cycles:  # a hook failed, before the row was written
            row = self.logger.committed(counters, metrics)
            BestEffort("the best student")(lambda: self.best.committed(row, self.executor))
        return self.saver.rescue(counters)
