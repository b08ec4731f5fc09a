"""Exponential moving average (EMA) of the trained weights, on this rank's shards, in fp32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from diffusers.training_utils import EMAModel
from torch import Tensor, nn

from miles_dmd.training.shard import like, local


class ShardedEma:
    """Starts as a copy; moves only when ``update`` is called, which is after a successful step of the student."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, decay: float, start_step: int) -> None:
        self._sharded = parameters
        # on local tensors: an average needs no collectives, and DTensor's dispatch costs more than the arithmetic
        self._model = EMAModel(
            self._local(),
            decay=decay,
            min_decay=decay,  # no ramp: the decay that the user asked for, from the first update on
            update_after_step=start_step - 1,  # EMAModel averages from the second update after it on
            foreach=True,
        )

    def update(self) -> float:
        """One step; returns the decay that it used: 0, a plain copy, in the first ``start_step`` updates."""
        self._model.step(self._local())
        return float(self._model.cur_decay_value or 0.0)

    @property
    def steps(self) -> int:
        """Updates so far."""
        return int(self._model.optimization_step)

    @steps.setter
    def steps(self, steps: int) -> None:
        self._model.optimization_step = steps

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The average as the network's parameters are: DTensors that share this rank's memory, or plain tensors."""
        for (name, parameter), average in zip(self._sharded.items(), self._model.shadow_params, strict=True):
            yield name, like(parameter, average)

    def _local(self) -> list[Tensor]:
        # EMAModel copies what requires no gradient
        return [local(p).detach().requires_grad_(p.requires_grad) for p in self._sharded.values()]
