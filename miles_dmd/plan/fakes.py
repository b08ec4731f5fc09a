"""Fakes for testing the controller: batches, executor and hooks that record the order of events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from miles_dmd.errors import PhaseError
from miles_dmd.plan.schedule import PhaseRequest, PhaseResult, TrainerCounters
from miles_dmd.validators import count


class FakeBatchProvider:
    """``num_batches`` numbered batches, then StopIteration. ``sent_batches`` counts the fresh ones."""

    def __init__(self, num_batches: int = 1, batch_size: int = 1) -> None:
        self.num_batches = count("num_batches", num_batches)
        self.batch_size = count("batch_size", batch_size, 1)
        self.sent_batches = 0
        self._student_batch: dict[str, Any] | None = None

    def next(self, request: PhaseRequest) -> dict[str, Any]:
        if request.batch_policy == "reuse_student":
            if self._student_batch is None:
                raise PhaseError("no student batch to reuse yet: the student phase comes first")
            return {**self._student_batch, "kind": request.kind}
        if self.sent_batches >= self.num_batches:
            raise StopIteration(f"all {self.num_batches} batches are sent")
        batch = {"kind": request.kind, "index": self.sent_batches, "batch_size": self.batch_size}
        self.sent_batches += 1
        if request.kind == "student":
            self._student_batch = batch
        return dict(batch)


class FakePhaseExecutor:
    """Steps every requested role once. ``skip_student``: no student step; ``fail_on``: a phase kind, or how many phases
    succeed before one fails. ``executed`` lists the requests in order."""

    def __init__(self, skip_student: bool = False, fail_on: str | int | None = None) -> None:
        self.skip_student = skip_student
        self.fail_on = fail_on
        self.executed: list[PhaseRequest] = []

    def execute_phase(self, request: PhaseRequest, batch: Mapping[str, Any]) -> PhaseResult:
        if batch["kind"] != request.kind:
            raise PhaseError(f"a batch made for the {batch['kind']} phase came to the {request.kind} phase")
        self.executed.append(request)
        if self.fail_on in (request.kind, len(self.executed) - 1):
            raise RuntimeError(f"fail_on={self.fail_on!r}: the {request.kind} phase fails")
        steps = {} if self.skip_student and request.kind == "student" else dict.fromkeys(request.trainable_roles, 1)
        return PhaseResult({"loss": float(len(self.executed))}, steps)


class FakeDistillationHooks:
    """``calls`` records what each call saw."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def after_completed_step(self, counters: TrainerCounters, metrics: Mapping[str, Any], executor: Any) -> None:
        self.calls.append({**asdict(counters), "metrics": dict(metrics), "executor": executor})
