"""Trainer: one group's models, optimizer and step; in a test, one process, or a Ray actor.

    batch of this rank --> look up conditions --> micro-batches --> objective --> backward, weighted by samples
    --> all ranks agree that everything is finite --> clip --> step --> scheduler --> EMA (student only)

The trainer knows no role by name: the plan says which models its group holds and which one trains, the role says from
which argument each is loaded, and the loss type says what the trained one minimises.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers.optimization import get_scheduler
from torch import Tensor
from torch.distributed.tensor import DTensor

from miles_dmd import registry
from miles_dmd.contracts.external import ExternalData
from miles_dmd.contracts.loss import LossType
from miles_dmd.contracts.reports import TrainReport
from miles_dmd.contracts.samples import DenoisingBatch
from miles_dmd.errors import ExternalDataError
from miles_dmd.network.conditions import PromptTable
from miles_dmd.network.denoiser import Denoiser
from miles_dmd.network.pretrained import load_network
from miles_dmd.plan import DistillationPlan
from miles_dmd.plan.partition import micro_batches
from miles_dmd.training.compute import Compute, peak_memory_bytes
from miles_dmd.training.ema import ShardedEma
from miles_dmd.training.optimizer import ShardedAdamW
from miles_dmd.training.shard import group_mesh, shard
from miles_dmd.training.state import TrainerState

BUCKET_BYTES = 256 << 20
"""Most that is gathered at once when weights leave their shards."""


class Trainer:
    """``args`` are the group's own. The process group of the group's ranks must be initialised."""

    def __init__(
        self,
        args: Any,
        group: str,
        *,
        plan: DistillationPlan,
        loss_type: LossType,
        compute: Compute,
        prompts: PromptTable,
        horizon: int,
    ) -> None:
        self.args, self.group, self.loss_type, self.compute, self.prompts = args, group, loss_type, compute, prompts
        family = registry.load("models", args.model_family)
        self.can_guide = family.can_guide
        self.mesh = group_mesh(compute)
        self.trained = plan.trainable_role(group)
        checkpoints: Mapping[str, str] = registry.load("roles", group).checkpoints
        self.models = {
            role: self._open(family, Path(getattr(args, checkpoints[role])), trains=role == self.trained)
            for role in plan.roles_of(group)
            if role in checkpoints  # a moving average is a role, but no network
        }
        self.optimizer: torch.optim.Optimizer | None = None
        self.ema: ShardedEma | None = None
        if self.trained is not None:
            self._build_optimizer(horizon)
            if "student_ema" in plan.roles_of(group):
                self.ema = ShardedEma(self._network, decay=args.ema_decay, start_step=args.ema_start_step)

    @property
    def state(self) -> TrainerState:
        """What a checkpoint holds of this trainer. A frozen network is not in it: its files are."""
        if self.trained is None:
            return TrainerState()
        return TrainerState(
            network=self._network,
            optimizer=self.optimizer,
            shards=self._adamw.shards,
            scheduler=self.scheduler,
            average=self.ema,
        )

    @property
    def _network(self) -> torch.nn.Module:
        assert self.trained is not None, f"group {self.group!r} trains nothing"
        return self.models[self.trained].network

    def _open(self, family: Any, checkpoint: Path, *, trains: bool) -> Denoiser:
        network = load_network(family, checkpoint)
        network.requires_grad_(trains)
        if trains and self.args.gradient_checkpointing:
            network.enable_gradient_checkpointing()  # type: ignore[operator]
        return Denoiser(
            family.code(), shard(network, family.shard_blocks, self.mesh, self.compute.dtype), self.compute.dtype
        )

    def _build_optimizer(self, horizon: int) -> None:
        args = self.args
        self._adamw = ShardedAdamW(self._network, args)
        self.optimizer = self._adamw.optimizer
        self.scheduler = get_scheduler(
            args.lr_scheduler, self.optimizer, num_warmup_steps=args.lr_warmup_steps, num_training_steps=horizon
        )

    # -- one optimizer step ---------------------------------------------------------------------------------------

    def train(self, batch: DenoisingBatch, external: Mapping[str, ExternalData]) -> TrainReport:
        """One optimizer step of the trained role on this rank's samples, or an agreed skip."""
        started = time.perf_counter()
        batch = self._conditioned(batch)
        scores = self._required(batch, external)
        metrics, nonfinite = self._accumulate(batch, scores)
        metrics["grad_norm"] = self._adamw.clip(self.args.clip_grad).item()
        metrics["lr"] = self._adamw.optimizer.param_groups[0]["lr"]
        applied = self._all_finite(nonfinite, metrics)
        if applied:
            metrics |= self._step()
        self._adamw.zero_grad()
        return TrainReport(
            num_samples=len(batch),
            metrics=metrics,
            nonfinite=nonfinite,
            applied=applied,
            seconds=time.perf_counter() - started,
            peak_memory=peak_memory_bytes(self.compute.device),
        )

    def _accumulate(self, batch: DenoisingBatch, scores: Mapping[str, ExternalData]) -> tuple[dict[str, float], int]:
        objective = registry.resolve(self.loss_type.objectives[self.trained])  # type: ignore[index]
        totals: dict[str, float] = {}
        nonfinite = 0
        for rows in micro_batches(len(batch), self.args.micro_batch_size):
            part = batch.take(rows)
            tensors = {
                producer: data.require(tuple(data.tensors), part.ids, part.policy_version).tensors
                for producer, data in scores.items()
            }
            output = objective(self.models, part, tensors, self.args.loss_options)
            weight = len(rows) / len(batch)  # a short last micro-batch weighs less, so that splitting changes nothing
            (output.loss * weight).backward()
            nonfinite += int(output.nonfinite)
            for name, value in {"loss": output.loss.detach(), **output.metrics}.items():
                totals[name] = totals.get(name, 0.0) + float(value) * weight
        return totals, nonfinite

    def _all_finite(self, nonfinite: int, metrics: Mapping[str, float]) -> bool:
        """Whether every rank saw only finite numbers: one that did not makes all of them skip."""
        bad = nonfinite > 0 or not all(map(_is_finite, (metrics["loss"], metrics["grad_norm"])))
        flag = torch.tensor([float(bad)], device=self.compute.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return flag.item() == 0

    def _step(self) -> dict[str, float]:
        self._adamw.step()
        self.scheduler.step()
        return {} if self.ema is None else {"ema_decay": self.ema.update()}

    # -- what others ask of this group ------------------------------------------------------------------------------

    @torch.no_grad()
    def score(self, batch: DenoisingBatch) -> ExternalData:
        """What this group says about this rank's samples, on the CPU in fp32."""
        scorer = registry.resolve(self.loss_type.scorers[self.group])
        batch = self._conditioned(batch)
        parts = [
            ExternalData(self.group, part.ids, part.policy_version, self._told(scorer, part))
            for rows in micro_batches(len(batch), self.args.micro_batch_size)
            for part in [batch.take(rows)]
        ]
        return ExternalData.join(parts)

    def _told(self, scorer: Any, part: DenoisingBatch) -> dict[str, Tensor]:
        found, said = scorer(self.models, part, self.args.loss_options), self.loss_type.tells[self.group]
        if set(found) != set(said):
            raise ExternalDataError(
                f"{self.group!r} tells {', '.join(sorted(found)) or 'nothing'}, and the loss type says that it tells "
                f"{', '.join(sorted(said))}; make its tells and its scorer agree"
            )
        return {name: value.float().cpu() if isinstance(value, Tensor) else value for name, value in found.items()}

    def weights(self, *, averaged: bool = False) -> Iterator[dict[str, Tensor]]:
        """The trained role's full parameters on the CPU in fp32, bucket by bucket; every rank must iterate to the end.

        ``averaged`` asks for the moving average instead of the live weights.
        """
        if averaged and self.ema is None:
            raise ValueError(f"group {self.group!r} keeps no moving average")
        named = dict(self.ema.named_parameters() if averaged and self.ema else self._network.named_parameters())
        for names in self.buckets:
            # a copy, because of one rank it would be the live weights
            yield {name: _full(named[name].detach()).to("cpu", copy=True) for name in names}

    @functools.cached_property
    def buckets(self) -> list[list[str]]:
        """Names of the trained role's parameters, as they travel together."""
        buckets: list[list[str]] = [[]]
        size = 0
        for name, value in self._network.named_parameters():
            if buckets[-1] and size + value.nbytes > BUCKET_BYTES:
                buckets.append([])
                size = 0
            buckets[-1].append(name)
            size += value.nbytes
        return buckets

    # -- conditions and external data -------------------------------------------------------------------------------

    def _conditioned(self, batch: DenoisingBatch) -> DenoisingBatch:
        uncond = self.prompts.unconditional(len(batch)) if self.can_guide else None
        return replace(batch.to(self.compute.device), cond=self.prompts.lookup(batch.prompt_ids), uncond=uncond)

    def _required(self, batch: DenoisingBatch, external: Mapping[str, ExternalData]) -> dict[str, ExternalData]:
        needs = self.loss_type.needs.get(self.trained or "", {})
        return {
            producer: external[producer].require(keys, batch.ids, batch.policy_version)
            for producer, keys in needs.items()
        }


def _full(value: Tensor) -> Tensor:
    if not isinstance(value, DTensor):
        return value
    return value.to_local() if value.device_mesh.size() == 1 else value.full_tensor()


def _is_finite(value: float) -> bool:
    return value == value and abs(value) != float("inf")
