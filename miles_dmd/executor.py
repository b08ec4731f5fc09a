"""One phase, played by trainer groups wherever they live: in this process, or as Ray actors.

    student phase       score by the groups that the loss needs --> train --> weights to the rollout engine, version + 1
    fake-score phase    train

The driver opens no tensor: it passes handles on, and reads plain numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from miles_dmd.checkpoint.manifest import FileEntry
from miles_dmd.contracts.distillation import Distillation
from miles_dmd.contracts.engine import RolloutRequest
from miles_dmd.contracts.loss import LossType
from miles_dmd.contracts.reports import ExportReport, SampleStatistics, TrainReport
from miles_dmd.errors import ExternalDataError, PhaseError
from miles_dmd.handles import BatchHandle, ScoreHandle, WeightHandle
from miles_dmd.observe.spans import SpanLog
from miles_dmd.plan import DistillationPlan, PhaseRequest, PhaseResult


class TrainerGroup(Protocol):
    """The ranks of one trainer role, addressed as one."""

    name: str
    size: int

    def train(self, batch: BatchHandle, scores: Mapping[str, ScoreHandle]) -> list[TrainReport]: ...

    def score(self, batch: BatchHandle) -> ScoreHandle: ...

    def weights(self, *, averaged: bool) -> WeightHandle: ...

    def save(self, directory: Path) -> list[FileEntry]: ...

    def load(self, directory: Path) -> None: ...


class Rollouts(Protocol):
    """The rollout worker, addressed from the driver.

    It has left the device after ``generate`` and ``sleep``; new weights and pictures of the student wake it.
    """

    def generate(self, batches: Sequence[Sequence[RolloutRequest]], num_chunks: int) -> list[BatchHandle]: ...

    def update_weights(self, weights: WeightHandle, version: int) -> None: ...

    def sleep(self) -> None: ...

    def pictures(self, requests: Sequence[RolloutRequest], limit: float | None) -> tuple[Any, SampleStatistics]: ...

    def teacher_pictures(
        self, requests: Sequence[RolloutRequest], sampling: Mapping[str, Any]
    ) -> tuple[Any, SampleStatistics]: ...

    def export(self, directory: Path, weights: WeightHandle, distillation: Distillation) -> ExportReport: ...

    def take_exported(self, directory: Path, version: int) -> None: ...

    def save_batches(self, batches: Sequence[BatchHandle], directory: Path) -> list[FileEntry]: ...

    def load_batches(self, paths: Sequence[Path], num_chunks: int) -> list[BatchHandle]: ...

    def peak_memory(self) -> int: ...


class GroupExecutor:
    """A ``DistillationPhaseExecutor`` over trainer groups."""

    def __init__(
        self,
        plan: DistillationPlan,
        loss_type: LossType,
        groups: Mapping[str, TrainerGroup],
        rollouts: Rollouts,
        spans: SpanLog,
    ) -> None:
        self.plan, self.loss_type, self.groups, self.rollouts, self.spans = plan, loss_type, groups, rollouts, spans
        self.policy_version = 0
        self._engine_asleep = False
        self.peak_memory: dict[str, int] = {}

    @property
    def num_chunks(self) -> int:
        """Chunks of a batch: the least number from which every group can take equally many a rank."""
        return math.lcm(*(group.size for group in self.groups.values()))

    def generate(self, batches: Sequence[Sequence[RolloutRequest]]) -> list[BatchHandle]:
        """Sample several batches at once, after which the engine has left the device."""
        with self.spans.span("rollout", group="rollout"):
            handles = self.rollouts.generate(batches, self.num_chunks)
        self._engine_asleep = True
        return handles

    def sampling(self) -> Rollouts:
        """The rollout worker, for a call that wakes it."""
        self._engine_asleep = False
        return self.rollouts

    def trainers(self) -> Mapping[str, TrainerGroup]:
        """The groups, with their devices to themselves: the engine, which shares them, is asleep when this returns.

        Not needed to gather weights: each parameter goes to the host before the next is gathered.
        """
        if not self._engine_asleep:
            self.rollouts.sleep()
            self._engine_asleep = True
        return self.groups

    def execute_phase(self, request: PhaseRequest, batch: BatchHandle) -> PhaseResult:
        if batch.policy_version != self.policy_version:
            raise ExternalDataError(
                f"the batch was sampled by policy version {batch.policy_version}; the student is at "
                f"{self.policy_version}"
            )
        (role,) = request.trainable_roles
        group = self.trainers()[self.plan.group_of(role)]
        scores = {producer: self._score(producer, batch) for producer in self.loss_type.needs.get(role, {})}
        with self.spans.span(f"{group.name} train", group=group.name):
            reports = group.train(batch, scores)
        self.peak_memory[group.name] = max([self.peak_memory.get(group.name, 0), *(r.peak_memory for r in reports)])
        applied = agreed(group.name, reports)
        if applied and request.kind == "student":
            self.sync_weights(self.policy_version + 1)
        return PhaseResult(metrics=combined(reports), optimizer_steps={role: 1} if applied else {})

    def _score(self, producer: str, batch: BatchHandle) -> ScoreHandle:
        with self.spans.span("score", group=producer):
            return self.groups[producer].score(batch)

    def sync_weights(self, version: int) -> None:
        """The student's weights to the rollout engine; samples carry ``version`` from now on."""
        with self.spans.span("weight sync", group="rollout"):
            student = self.groups[self.plan.group_of("student")]
            self.sampling().update_weights(student.weights(averaged=False), version)
        self.policy_version = version

    def with_averaged_weights(self, use: Callable[[], Any]) -> Any:
        """Call ``use`` while the engine samples from the student's moving average, then put the student back."""
        student = self.groups[self.plan.group_of("student")]
        self.sampling().update_weights(student.weights(averaged=True), self.policy_version)
        result = use()  # where that fails the run ends, and nobody needs the student's weights any more
        self.rollouts.update_weights(student.weights(averaged=False), self.policy_version)
        return result


def agreed(group: str, reports: Sequence[TrainReport]) -> bool:
    """Whether the step was taken; ranks that tell different stories end the run."""
    applied = {report.applied for report in reports}
    if len(applied) != 1:
        raise PhaseError(
            f"ranks of {group!r} disagree on whether they stepped: {[report.applied for report in reports]}"
        )
    return applied.pop()


def combined(reports: Sequence[TrainReport]) -> dict[str, float]:
    """Means over all samples of the phase; counts add up, the slowest rank tells the time."""
    samples = sum(report.num_samples for report in reports)
    means = {
        name: math.fsum(report.metrics[name] * report.num_samples for report in reports) / samples
        for name in reports[0].metrics
    }
    return {
        **means,
        "nonfinite": float(sum(report.nonfinite for report in reports)),
        "seconds": max(report.seconds for report in reports),
        "peak_memory_mib": max(report.peak_memory for report in reports) / 2**20,
    }
