"""Reports of workers to the driver: plain numbers, no tensors. Knows no torch."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleStatistics:
    """What the rollout worker tells of finished samples, several seeds a prompt."""

    spread: float
    """Mean distance between two seeds of a prompt (root mean squared difference of latents), a mean over prompts."""
    saturation: float
    """Share of values whose magnitude is above ``limit``."""
    limit: float
