"""Engines whose network lives in this process: weights, sleep and wake."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from miles_dmd.errors import EngineError
from miles_dmd.training.compute import release_cached_memory


class ResidentEngine:
    """What the in-process engines of all modalities share; ``version`` is that of the weights that it holds."""

    notes: Sequence[str] = ()

    def __init__(self, network: nn.Module, device: torch.device) -> None:
        self.network, self.device = network, device
        self.version = 0
        self.asleep = False

    def require_awake(self) -> None:
        """Raises EngineError while it is asleep."""
        if self.asleep:
            raise EngineError("the rollout engine is asleep; wake it before it samples")

    def update_weights(self, buckets: Iterable[Mapping[str, Tensor]], version: int) -> None:
        own = dict(self.network.named_parameters())
        seen: set[str] = set()
        with torch.no_grad():
            for bucket in buckets:
                if unknown := sorted(bucket.keys() - own.keys()):
                    raise EngineError(
                        f"weights of version {version} name {unknown[:4]}, which the network does not have"
                    )
                for name, value in bucket.items():
                    own[name].copy_(value)
                seen |= bucket.keys()
        if missing := sorted(own.keys() - seen):
            raise EngineError(f"weights of version {version} lack {missing[:4]} ({len(missing)} parameters in all)")
        self.version = version

    def sleep(self) -> None:
        self.network.to("cpu")
        release_cached_memory()
        self.asleep = True

    def wake(self) -> None:
        self.network.to(self.device)
        self.asleep = False

    def health(self) -> Mapping[str, str]:
        return {"in process": ""}

    def close(self) -> None: ...
