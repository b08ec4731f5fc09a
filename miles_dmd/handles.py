"""Handles of batches, scores and weights: where the tensors lie, and of which samples they are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class BatchHandle:
    """A phase's batch, cut into equal chunks so that groups of any allowed size can take consecutive ones."""

    ids: tuple[int, ...]
    policy_version: int
    chunks: tuple[Any, ...]
    """One reference (an object reference in Ray, the batch itself in one process) per chunk."""

    def of_rank(self, rank: int, ranks: int) -> tuple[Any, ...]:
        """The chunks of one rank out of ``ranks``."""
        count = len(self.chunks) // ranks
        return self.chunks[rank * count : (rank + 1) * count]


@dataclass(frozen=True, slots=True)
class ScoreHandle:
    """External data of one producer about a batch, one reference per rank of the producer."""

    producer: str
    parts: tuple[Any, ...]

    def of_rank(self, rank: int, ranks: int) -> tuple[Any, ...]:
        """The parts that speak of samples of one rank out of ``ranks``: batches are cut into consecutive rows."""
        count = len(self.parts)
        return self.parts[rank * count // ranks : -(-(rank + 1) * count // ranks)]


@dataclass(frozen=True, slots=True)
class WeightHandle:
    """Full weights of a role, one reference per bucket, each gathered when it is asked for: once, and in order."""

    buckets: Iterable[Any]
