"""Diversity and saturation of finished latents, several seeds per prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

EXTENT = 0.999
"""Share of a sample's values that lie within its ``extent``."""
HEADROOM = 1.2
"""Range of the data, as a multiple of the reference's extent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleStatistics:
    """Statistics of finished samples, several seeds a prompt."""

    spread: float
    """Mean distance between two seeds of a prompt (root mean squared difference of latents), a mean over prompts."""
    saturation: float
    """Share of values whose magnitude is above ``limit``."""
    limit: float


def statistics(samples: Tensor, groups: Sequence[int], limit: float | None = None) -> SampleStatistics:
    """``samples`` [B, ...], those with the same number in ``groups`` being of one prompt.

    ``limit`` is where the data's range ends; without one these samples are the reference, and HEADROOM times their
    extent is it.
    """
    samples = samples.float()
    limit = HEADROOM * extent(samples) if limit is None else limit
    index = torch.as_tensor(groups)
    distances = [mean_pairwise_distance(samples[index == group]) for group in dict.fromkeys(groups)]
    return SampleStatistics(
        spread=sum(distances) / len(distances), saturation=share_beyond(samples, limit), limit=limit
    )


def mean_pairwise_distance(samples: Tensor) -> float:
    """Mean over all pairs of ``samples`` [S, ...] of their root mean squared difference; 0 for a single one."""
    flat = samples.flatten(1)
    return float(torch.pdist(flat).mean()) / flat.shape[1] ** 0.5 if len(flat) > 1 else 0.0


def share_beyond(samples: Tensor, limit: float) -> float:
    """Share of values whose magnitude is above ``limit``."""
    return float((samples.abs() > limit).float().mean())


def extent(samples: Tensor) -> float:
    """The magnitude that a share EXTENT of the values does not exceed; torch.quantile refuses this many."""
    values = samples.abs().flatten()
    return float(values.kthvalue(max(1, round(EXTENT * len(values)))).values)
