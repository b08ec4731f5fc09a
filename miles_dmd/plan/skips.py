"""Bound on skipped cycles: those given up because a phase skipped its optimizer step on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from miles_dmd.errors import PhaseReportError
from miles_dmd.plan.schedule import PhaseRequest
from miles_dmd.validators import count

logger = logging.getLogger(__name__)


class Skips:
    """``total`` of a run, and how many came ``in_a_row`` since the last committed cycle; ``bound`` of those is allowed.

    0: a skip is fatal. A skip after the student's step of its cycle is fatal under every bound: the engine samples that
    student already, and the counters would not know of its step.
    """

    def __init__(self, bound: int = 0) -> None:
        self.bound = count("max_consecutive_skipped_cycles", bound)
        self.total = self.in_a_row = 0

    def add(self, request: PhaseRequest, *, student_stepped: bool) -> None:
        """Count the skipped phase of ``request``. Raises PhaseReportError if that is too many in a row."""
        self.total += 1
        self.in_a_row += 1
        where = f"the {request.kind} phase after step {request.global_step} skipped its optimizer step on all ranks"
        if student_stepped and self.in_a_row <= self.bound:
            raise PhaseReportError(
                f"{where}, and the student of the same cycle has stepped already, which cannot be taken back"
            )
        logger.warning("%s; its cycle is given up (%d so far)", where, self.total)
        if self.in_a_row > self.bound:
            raise PhaseReportError(
                f"{where}: {self.in_a_row} cycles in a row, where max_consecutive_skipped_cycles allows {self.bound}"
            )

    def committed(self) -> None:
        self.in_a_row = 0

    def reset(self) -> None:
        self.total = self.in_a_row = 0

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.total, self.in_a_row = state["total"], state["in_a_row"]
