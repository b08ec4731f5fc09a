"""Reports of workers to the driver: plain numbers, no tensors. Knows no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReport:
    """One optimizer step of one rank, taken or skipped."""

    weight: float
    """Units (samples, or valid tokens) that the means in ``metrics`` are over."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Means over this rank's units, and numbers that are equal on all ranks (gradient norm, learning rate)."""
    nonfinite: int = 0
    applied: bool = True
    """False where the ranks agreed to skip the step: nothing has advanced."""
    seconds: float = 0.0
    peak_memory: int = 0
    """Bytes, of the rank's process since its start."""


ENOUGH = 0.99
"""Change kept from which --export-dtype auto takes the dtype that the student's pipeline directory is stored in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """The dtype of an exported student, and what it keeps."""

    dtype: str
    """bf16, fp16, fp32, fp64, or several with a + between them."""
    change_kept: float
    """Share of what the student learned that survives the rounding to ``dtype``; see training/rounding.py."""
    stored_dtype: str
    """Dtype of the pipeline directory that the student started from."""
    stored_change_kept: float
    """Share that this one keeps, or would."""

    def due(self, asked: str) -> str:
        """The dtype that --export-dtype ``asked`` for would give this student."""
        if asked == "auto":
            return self.stored_dtype if self.stored_change_kept >= ENOUGH else "fp32"
        return self.stored_dtype if asked == "stored" else asked

    def __str__(self) -> str:
        """``fp32, which keeps 100 % of what was learned; bf16, as its pipeline is stored, would keep 31.2 %``."""
        said = f"{self.dtype}, which keeps {percent(self.change_kept)} of what was learned"
        if self.dtype == self.stored_dtype:
            return said
        return f"{said}; {self.stored_dtype}, as its pipeline is stored, would keep {percent(self.stored_change_kept)}"


def percent(share: float) -> str:
    """Rounded down, so that 100 % means all."""
    return f"{math.floor(share * 1000) / 10:g} %"
