"""Per-sample random generators: the same numbers whatever batch, micro-batch, rank or machine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from miles_dmd import seeds
from miles_dmd.contracts.batch import Batch


def generators(batch: Batch, purpose: str) -> list[torch.Generator]:
    """One CPU generator a sample, from (run seed, purpose, sample id)."""
    return [from_seed(seeds.derive(batch.run_seed, purpose, sample)) for sample in batch.ids]


def from_seed(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def uniform(each: Sequence[torch.Generator]) -> Tensor:
    """[B] fp32 in [0, 1)."""
    return torch.cat([torch.rand(1, generator=generator) for generator in each])


def normal(each: Sequence[torch.Generator], shape: Sequence[int]) -> Tensor:
    """[B, *shape] fp32, each sample's drawn by its own generator."""
    return torch.stack([torch.randn(tuple(shape), generator=generator) for generator in each])
