"""Execution of one phase over trainer groups, in this process or as Ray actors.

    student phase       score by the groups that the loss needs --> train --> weights to the rollout engine, version + 1
    fake-score phase    train

The driver opens no tensor: it passes handles on, and reads plain numbers.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from miles_dmd.checkpoint.manifest import FileEntry
from miles_dmd.checkpoint.records import ROLLOUT_STATE
from miles_dmd.contracts.engine import RolloutRequest
from miles_dmd.contracts.loss import LossType
from miles_dmd.contracts.modality import Shown
from miles_dmd.contracts.reports import ExportReport, TrainReport
from miles_dmd.contracts.student import StudentRecord
from miles_dmd.errors import ExternalDataError, PhaseError
from miles_dmd.handles import BatchHandle, ScoreHandle, WeightHandle
from miles_dmd.observe.spans import SpanLog
from miles_dmd.plan import DistillationPlan, PhaseRequest, PhaseResult

ROLLOUT = "the rollout worker"
"""In messages."""
PENDING = "pending"
"""Folder of a checkpoint that holds sampled batches which no phase has used yet."""


class TrainerGroup(Protocol):
    """The ranks of one trainer group, addressed as one."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int:
        """Ranks."""
        ...

    def train(
        self, batch: BatchHandle, scores: Mapping[str, ScoreHandle], roles: Sequence[str]
    ) -> list[TrainReport]: ...

    def score(self, batch: BatchHandle) -> ScoreHandle: ...

    def weights(self, role: str, *, averaged: bool) -> WeightHandle: ...

    def save(self, directory: Path) -> list[FileEntry]: ...

    def load(self, directory: Path) -> None: ...


class Rollouts(Protocol):
    """The rollout worker, addressed from the driver.

    It alone wakes and puts to sleep its engine, which shares devices with the trainers: every call wakes it where
    it has to, and ``generate``, ``load_batches``, ``show_teacher`` and ``sleep`` leave it asleep.
    """

    def generate(self, batches: Sequence[Sequence[RolloutRequest]], num_chunks: int) -> list[BatchHandle]: ...

    def update_weights(self, weights: WeightHandle, version: int) -> None: ...

    def sleep(self) -> None: ...

    def show(self, requests: Sequence[RolloutRequest], reference: Any) -> Shown: ...

    def show_teacher(self, requests: Sequence[RolloutRequest], sampling: Mapping[str, Any]) -> Shown: ...

    def export(self, weights: WeightHandle, directory: Path, record: StudentRecord) -> ExportReport: ...

    def take_exported(self, directory: Path, version: int) -> None: ...

    def save_batches(self, batches: Sequence[BatchHandle], directory: Path) -> list[FileEntry]: ...

    def load_batches(self, paths: Sequence[Path], num_chunks: int) -> list[BatchHandle]: ...

    def save_state(self, path: Path) -> FileEntry: ...

    def load_state(self, path: Path) -> None: ...

    def peak_memory(self) -> int: ...


@dataclass(frozen=True, slots=True)
class StartedRun:
    """Trainer groups by name, in the plan's order, and the rollout worker: built, and ready for work."""

    groups: Mapping[str, TrainerGroup]
    rollouts: Rollouts


class GroupExecutor:
    """A ``DistillationPhaseExecutor`` over trainer groups, and all that a driver asks of groups and rollout worker.

    Whenever trainers compute, the engine is asleep: they train on batches of the present policy version only, and those
    were generated, or loaded, since the engine last woke. Gathering weights is no computing: each parameter goes to the
    host before the next is gathered.
    """

    def __init__(
        self,
        plan: DistillationPlan,
        loss_type: LossType,
        started: StartedRun,
        spans: SpanLog,
    ) -> None:
        self.plan, self.loss_type, self.spans = plan, loss_type, spans
        self._groups, self._rollouts = started.groups, started.rollouts
        self._peak_memory: dict[str, int] = {}
        self.policy_version = 0

    @property
    def group_sizes(self) -> dict[str, int]:
        """Ranks of each group."""
        return {name: group.size for name, group in self._groups.items()}

    @property
    def num_chunks(self) -> int:
        """Chunks of a batch: the least number from which every group can take equally many a rank."""
        return math.lcm(*self.group_sizes.values())

    @property
    def averages(self) -> bool:
        """True if the plan keeps a moving average of the student."""
        return self.plan.averaged_role is not None

    def generate(self, batches: Sequence[Sequence[RolloutRequest]]) -> list[BatchHandle]:
        """Sample several batches at once."""
        with self.spans.span("rollout", group="rollout"):
            return self._rollouts.generate(batches, self.num_chunks)

    # -- one phase ------------------------------------------------------------------------------------------------

    def execute_phase(self, request: PhaseRequest, batch: BatchHandle) -> PhaseResult:
        if batch.policy_version != self.policy_version:
            raise ExternalDataError(
                f"the batch was sampled by policy version {batch.policy_version}; the student is at "
                f"{self.policy_version}"
            )
        roles = request.trainable_roles
        group = self._groups[self.plan.group_of(roles[0])]  # all of a phase's roles live in one group
        scores = {producer: self._score(producer, batch) for producer in self.loss_type.needs_of(roles)}
        with self.spans.span(f"{group.name} train", group=group.name):
            reports = group.train(batch, scores, roles)
        peaks = (report.peak_memory for report in reports)
        self._peak_memory[group.name] = max(self._peak_memory.get(group.name, 0), *peaks)
        applied = agreed(group.name, reports)
        if applied and request.kind == "student":
            self.sync_weights(self.policy_version + 1)
        return PhaseResult(metrics=combined(reports), optimizer_steps=dict.fromkeys(roles, 1) if applied else {})

    def _score(self, producer: str, batch: BatchHandle) -> ScoreHandle:
        with self.spans.span("score", group=producer):
            return self._groups[producer].score(batch)

    def sync_weights(self, version: int) -> None:
        """The student's weights to the rollout engine; samples carry ``version`` from now on."""
        with self.spans.span("weight sync", group="rollout"):
            self._rollouts.update_weights(self._student_weights(averaged=False), version)
        self.policy_version = version

    def _student_weights(self, *, averaged: bool) -> WeightHandle:
        return self._groups[self.plan.group_of("student")].weights("student", averaged=averaged)

    # -- what a run shows and leaves --------------------------------------------------------------------------------

    def show_student(self, requests: Sequence[RolloutRequest], reference: Any) -> Shown:
        """Finished samples of the student's moving average, or of the student where the plan keeps none; and numbers
        about them, relative to ``reference``."""
        if self.averages:
            with self.averaged_weights():
                return self._rollouts.show(requests, reference)
        shown = self._rollouts.show(requests, reference)
        self._rollouts.sleep()
        return shown

    def show_teacher(self, requests: Sequence[RolloutRequest], sampling: Mapping[str, Any]) -> Shown:
        """Finished samples of the teacher, sampled as ``sampling`` says, and numbers about them."""
        return self._rollouts.show_teacher(requests, sampling)

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """The engine samples from the student's moving average in this block, and sleeps with the student's afterwards.

        Where the block fails the run ends, and nobody needs the student's weights any more.
        """
        self._rollouts.update_weights(self._student_weights(averaged=True), self.policy_version)
        yield
        self._rollouts.update_weights(self._student_weights(averaged=False), self.policy_version)
        self._rollouts.sleep()

    def show_exported(self, directory: Path, requests: Sequence[RolloutRequest], reference: Any) -> Shown:
        """Finished samples of the student in ``directory``, as it was rounded; the last that is asked of the engine."""
        self._rollouts.take_exported(directory, self.policy_version)
        return self._rollouts.show(requests, reference)

    def export(self, directory: Path, record: StudentRecord) -> ExportReport:
        """Write the weights that the plan exports as a model directory. Raises SaveError."""
        averaged = self.plan.export.role == "student_ema"
        return self._rollouts.export(self._student_weights(averaged=averaged), directory, record)

    def peak_memory(self) -> dict[str, int]:
        """Most bytes that a rank of each group has held, and the rollout worker."""
        return {**self._peak_memory, "rollout": self._rollouts.peak_memory()}

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, staging: Path, pending: Sequence[BatchHandle]) -> list[FileEntry]:
        """Every group's state and the ``pending`` batches into ``staging``, a folder each. Raises SaveError."""
        self._rollouts.sleep()  # for what trainers gather while they write
        for name in (*self._groups, PENDING):
            (staging / name).mkdir()  # before any rank writes: one that failed here would leave others waiting
        written = [entry for name, group in self._groups.items() for entry in group.save(staging / name)]
        written += self._rollouts.save_batches(pending, staging / PENDING)
        return [*written, self._rollouts.save_state(staging / ROLLOUT_STATE)]

    def load(self, directory: Path, policy_version: int, num_pending: int) -> list[BatchHandle]:
        """Put what ``save`` wrote into groups and engine; returns the pending batches. Raises CheckpointError."""
        self._rollouts.sleep()
        for name, group in self._groups.items():
            group.load(directory / name)
        self.sync_weights(policy_version)
        # by number, never by a name that the checkpoint states
        paths = [directory / PENDING / f"batch_{number:03d}.safetensors" for number in range(num_pending)]
        return self._rollouts.load_batches(paths, self.num_chunks)

    def load_random_state(self, directory: Path) -> None:
        """The global generators of the rollout worker; ranks have theirs in ``load``. Raises CheckpointError."""
        if (path := directory / ROLLOUT_STATE).is_file():
            self._rollouts.load_state(path)


def agreed(group: str, reports: Sequence[TrainReport]) -> bool:
    """True if the step was taken. Raises PhaseError where ranks disagree."""
    applied = {report.applied for report in reports}
    if len(applied) != 1:
        raise PhaseError(
            f"ranks of {group!r} disagree on whether they stepped: {[report.applied for report in reports]}"
        )
    return applied.pop()


def combined(reports: Sequence[TrainReport]) -> dict[str, float]:
    """Means over all units of the phase, whose number is ``weight``; counts add up, the slowest rank tells the time."""
    weight = math.fsum(report.weight for report in reports)
    means = {
        name: math.fsum(report.metrics[name] * report.weight for report in reports) / weight
        for name in reports[0].metrics
    }
    return {
        **means,
        "weight": weight,
        "nonfinite": float(sum(report.nonfinite for report in reports)),
        "seconds": max(report.seconds for report in reports),
        "peak_memory_mib": max(report.peak_memory for report in reports) / 2**20,
    }
