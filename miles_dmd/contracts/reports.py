"""What a trainer rank tells the driver: plain numbers, so that the driver opens no tensor. Knows no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReport:
    """One optimizer step of one rank, taken or skipped."""

    num_samples: int
    """How many samples the means in ``metrics`` are over."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Means over this rank's samples, and numbers that are equal on all ranks (gradient norm, learning rate)."""
    nonfinite: int = 0
    applied: bool = True
    """False where the ranks agreed to skip the step: nothing has advanced."""
    seconds: float = 0.0
    peak_memory: int = 0
    """Bytes, of the rank's process since its start."""
