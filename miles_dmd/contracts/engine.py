"""The seam between the run and whatever samples from the student."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from miles_dmd.contracts.samples import DenoisingBatch


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """One sample: which prompt, which noise, where to stop."""

    sample_id: int
    prompt_id: int
    seed: int
    """Of the sample's own CPU generator: initial latents first, then one tensor per re-noised step, in order."""
    stop_step: int
    """k in [0, N-1]: k+1 forwards, of which the last is the one that is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineType:
    """The declaration of an engine: what the command line may know of it without torch."""

    build: str
    """Dotted name of ``build(args, compute, prompts) -> RolloutEngine``."""


class RolloutEngine(Protocol):
    def generate(self, requests: Sequence[RolloutRequest]) -> DenoisingBatch:
        """Sample until each request's stop step, in the order of the requests. Safe to repeat: it changes nothing."""
        ...

    def sample(self, requests: Sequence[RolloutRequest]) -> Tensor:
        """[B, C, H, W] fp32: the finished latents of all N steps; stop steps are ignored."""
        ...

    def update_weights(self, buckets: Iterable[Mapping[str, Tensor]], version: int) -> None:
        """Sample from these weights from now on, and stamp batches with ``version``. All of them or EngineError."""
        ...

    def sleep(self) -> None:
        """Give the accelerator's memory back until ``wake``."""
        ...

    def wake(self) -> None: ...

    def close(self) -> None: ...
