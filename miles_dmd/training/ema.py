"""The moving average of the trained role's weights, on this rank's shards, in fp32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from diffusers.training_utils import EMAModel
from torch import Tensor, nn


class ShardedEma:
    """Starts as a copy; moves only when ``update`` is called, which is after a successful step of the student."""

    def __init__(self, network: nn.Module, *, decay: float, start_step: int) -> None:
        self._names: Sequence[str] = [name for name, _ in network.named_parameters()]
        self._model = EMAModel(
            network.parameters(),
            decay=decay,
            min_decay=decay,  # no ramp: the decay that the user asked for, from the first update on
            update_after_step=start_step,
            foreach=False,  # foreach kernels do not know DTensor
        )

    def update(self, network: nn.Module) -> float:
        """One step; returns the decay that it used: 0, a plain copy, up to and including ``start_step`` + 1."""
        self._model.step(network.parameters())
        return float(self._model.cur_decay_value or 0.0)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return iter(zip(self._names, self._model.shadow_params, strict=True))
