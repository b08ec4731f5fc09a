"""AdamW on this rank's shards: plain tensors that share memory with the sharded parameters.

An element-wise optimizer needs no collectives, and DTensor's dispatch of it, list by list, costs a small network more
than the arithmetic. The gradient norm is the only thing that ranks must put together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from miles_dmd.training.shard import local


class ShardedAdamW:
    """``optimizer`` is torch's own, over ``shards``: this rank's parts of the parameters of ``network``, by name."""

    def __init__(self, network: nn.Module, args: Any) -> None:
        self._network = network
        self.shards: Mapping[str, nn.Parameter] = {
            name: nn.Parameter(local(parameter.detach()), requires_grad=parameter.requires_grad)
            for name, parameter in network.named_parameters()
        }
        self.optimizer = torch.optim.AdamW(
            list(self.shards.values()),
            lr=args.lr,
            betas=args.betas,
            eps=args.adam_eps,
            weight_decay=args.weight_decay,
            fused=True,
        )

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients of all ranks down to ``max_norm``; returns their norm before, equal on all ranks."""
        for name, parameter in self._network.named_parameters():
            self.shards[name].grad = None if parameter.grad is None else local(parameter.grad)
        gradients = [shard.grad for shard in self.shards.values() if shard.grad is not None]
        square = torch.nn.utils.get_total_norm(gradients).square()
        dist.all_reduce(square)  # every element of the network lies on exactly one rank
        norm = square.sqrt()
        torch.nn.utils.clip_grads_with_norm_(self.shards.values(), max_norm, norm)
        return norm

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Of the shards and of the parameters whose memory they share."""
        self.optimizer.zero_grad(set_to_none=True)
        self._network.zero_grad(set_to_none=True)
