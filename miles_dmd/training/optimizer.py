"""AdamW on this rank's shards: plain tensors that share memory with the sharded parameters.

An element-wise optimizer needs no collectives, and DTensor's dispatch of it, list by list, costs a small network more
than the arithmetic. The gradient norm is the only thing that ranks must put together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from miles_dmd.training.shard import local


class Hyperparameters(Protocol):
    """AdamW's, as a trainer's arguments name them."""

    @property
    def lr(self) -> float: ...
    @property
    def betas(self) -> tuple[float, float]: ...
    @property
    def adam_eps(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...


class ShardedAdamW:
    """``adamw`` is torch's own, over ``shards``: this rank's parts of ``parameters``, by name."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], args: Hyperparameters) -> None:
        self.parameters = parameters
        self.shards: Mapping[str, nn.Parameter] = {
            name: nn.Parameter(local(parameter.detach())) for name, parameter in parameters.items()
        }
        self.adamw = torch.optim.AdamW(
            list(self.shards.values()),
            lr=args.lr,
            betas=args.betas,
            eps=args.adam_eps,
            weight_decay=args.weight_decay,
            fused=True,
        )

    def collect_gradients(self) -> None:
        """Give each shard the gradient of its parameter, sharing memory; before ``clip`` and ``step``."""
        for name, parameter in self.parameters.items():
            self.shards[name].grad = None if parameter.grad is None else local(parameter.grad)

    def clip(self, max_norm: float) -> Tensor:
        """Scale the collected gradients of all ranks down to ``max_norm``; returns their norm before, equal on all."""
        gradients = [shard.grad for shard in self.shards.values() if shard.grad is not None]
        square = torch.nn.utils.get_total_norm(gradients).square()
        dist.all_reduce(square)  # every element of the network lies on exactly one rank
        norm = square.sqrt()
        torch.nn.utils.clip_grads_with_norm_(self.shards.values(), max_norm, norm)
        return norm

    def step(self) -> None:
        self.adamw.step()

    def zero_grad(self) -> None:
        """Drop the gradients of shards and parameters."""
        self.adamw.zero_grad(set_to_none=True)
        for parameter in self.parameters.values():
            parameter.grad = None
