"""Batch contract: samples of any modality, with ids, policy version and weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

B = TypeVar("B", bound="Batch")


class Batch(Protocol):
    """A frozen dataclass whose fields are plain values, tuples with an entry a sample, or tensors of as many rows."""

    @property
    def ids(self) -> tuple[int, ...]:
        """Sample ids, unique in a run."""
        ...

    @property
    def policy_version(self) -> int:
        """Version of the student that sampled it: 0 before its first update."""
        ...

    @property
    def run_seed(self) -> int:
        """With a sample's id, the root of all randomness that is about this sample."""
        ...

    @property
    def weight(self) -> float:
        """Units that losses and metrics are means over: samples, or valid tokens."""
        ...

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def take(self, rows: Sequence[int] | range) -> Batch:
        """The samples at ``rows``, in that order."""
        ...

    def to(self, device: torch.device) -> Batch: ...

    @staticmethod
    def join(parts: Sequence[Any]) -> Any:
        """One batch of several of its class, in order. Raises ValueError for those of other runs or policy versions."""
        ...


def join(parts: Sequence[B]) -> B:
    """One batch of several, in order; they must be of one run and one policy version."""
    joined: B = type(parts[0]).join(parts)
    return joined
