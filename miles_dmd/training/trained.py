"""Trained role: a network, its trainable parameters, and what moves with them (optimizer, scheduler, EMA)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from diffusers.optimization import get_scheduler
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from miles_dmd.training.buckets import packed
from miles_dmd.training.ema import ShardedEma
from miles_dmd.training.optimizer import ShardedAdamW
from miles_dmd.training.state import RoleState

if TYPE_CHECKING:
    from miles_dmd.config.args import Args


@dataclass(frozen=True)
class Trained:
    """One trained role of a group. A parameter that requires no gradient is in none of its parts."""

    role: str
    network: nn.Module
    optimizer: ShardedAdamW
    scheduler: torch.optim.lr_scheduler.LRScheduler
    average: ShardedEma | None
    """Moving average of the trained parameters, for a role that is averaged."""

    @classmethod
    def of(cls, role: str, network: nn.Module, args: Args, *, horizon: int, averaged: bool) -> Trained:
        """Train what requires a gradient in ``network``, for ``horizon`` optimizer steps, as ``args`` say."""
        parameters = trainable(network)
        optimizer = ShardedAdamW(parameters, args)
        scheduler = get_scheduler(
            args.lr_scheduler, optimizer.adamw, num_warmup_steps=args.lr_warmup_steps, num_training_steps=horizon
        )
        average = ShardedEma(parameters, decay=args.ema_decay, start_step=args.ema_start_step) if averaged else None
        return cls(role, network, optimizer, scheduler, average)

    @property
    def state(self) -> RoleState:
        """What a checkpoint holds of this role."""
        return RoleState(
            parameters=self.optimizer.parameters,
            optimizer=self.optimizer.adamw,
            shards=self.optimizer.shards,
            scheduler=self.scheduler,
            average=self.average,
        )

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return float(self.optimizer.adamw.param_groups[0]["lr"])

    def step(self) -> dict[str, float]:
        """One optimizer step with the gradients that were collected; returns what it has to tell."""
        self.optimizer.step()
        self.scheduler.step()
        return {} if self.average is None else {"ema_decay": self.average.update()}

    def weights(self, *, averaged: bool = False) -> Iterator[dict[str, Tensor]]:
        """Full trained parameters on the CPU in fp32, bucket by bucket; every rank must iterate to the end.

        ``averaged`` asks for the moving average instead of the live weights. Raises ValueError where there is none.
        """
        named: Mapping[str, Tensor] = self.optimizer.parameters
        if averaged:
            if self.average is None:
                raise ValueError(f"role {self.role!r} keeps no moving average")
            named = dict(self.average.named_parameters())
        for names in self.buckets:
            # a copy, because of one rank it would be the live weights
            yield {name: _full(named[name].detach()).to("cpu", copy=True) for name in names}

    @functools.cached_property
    def buckets(self) -> list[list[str]]:
        """Names of the trained parameters, as they travel together."""
        return [list(bucket) for bucket in packed(self.optimizer.parameters.items())]


def trainable(network: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of ``network`` that require a gradient, by name."""
    return {name: value for name, value in network.named_parameters() if value.requires_grad}


def _full(value: Tensor) -> Tensor:
    if not isinstance(value, DTensor):
        return value
    return value.to_local() if value.device_mesh.size() == 1 else value.full_tensor()
