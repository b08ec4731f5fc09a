"""Trainer: one group's models and optimizer steps; in a test, one process, or a Ray actor.

    batch of this rank --> what objectives read --> micro-batches --> objectives --> backward, weighted by units
    --> all ranks agree that everything is finite --> clip --> step --> scheduler --> EMA, for each trained role

The trainer knows no role by name: the plan says which models its group holds and which of them train, the role file
from which argument each is loaded, and the loss type what the trained ones minimise and which modules start fresh.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from miles_dmd import registry, seeds
from miles_dmd.contracts.batch import Batch
from miles_dmd.contracts.external import ExternalData
from miles_dmd.contracts.loss import BuildModule, LossType, Objective, Scorer
from miles_dmd.contracts.modality import Model
from miles_dmd.contracts.reports import TrainReport
from miles_dmd.errors import ExternalDataError
from miles_dmd.network.pretrained import load_network
from miles_dmd.plan import DistillationPlan
from miles_dmd.sampling.partition import micro_batches
from miles_dmd.training.compute import Compute, peak_memory_bytes
from miles_dmd.training.shard import group_mesh, shard
from miles_dmd.training.state import TrainerState
from miles_dmd.training.trained import Trained

if TYPE_CHECKING:
    from miles_dmd.config.args import Args


class Trainer:
    """``args`` are the group's own. The process group of the group's ranks must be initialised."""

    def __init__(
        self,
        args: Args,
        group: str,
        *,
        plan: DistillationPlan,
        loss_type: LossType,
        compute: Compute,
        prompts: Any,
        horizons: Mapping[str, int],
    ) -> None:
        """``prompts`` are what the modality has prepared of them; ``horizons``: optimizer steps of each trained role
        over the whole run."""
        self.args, self.group, self.loss_type, self.compute, self.prompts = args, group, loss_type, compute, prompts
        self.family = registry.load("models", args.model_family)
        self.modality = registry.load("modalities", loss_type.modality).torch()
        self.mesh = group_mesh(compute)
        roles = plan.trainable_roles_of(group)
        self.models: dict[str, Model | nn.Module] = {**self._open_networks(plan, roles)}
        self.models.update(self._fresh_modules(plan))
        self.trained = {
            role: Trained.of(
                role,
                _network(self.models[role]),
                args,
                horizon=horizons.get(role, 0),
                averaged=plan.averaged_role == role,
            )
            for role in roles
        }

    def _open_networks(self, plan: DistillationPlan, trained: Sequence[str]) -> dict[str, Model]:
        role = registry.load("roles", self.group)
        directories = {
            name: getattr(self.args, role.pipelines[name])
            for name in plan.roles_of(self.group)
            if name in role.pipelines  # a moving average is a role, but no network
        }
        return {
            name: self._open(Path(directory), trains=name in trained)
            for name, directory in directories.items()
            if directory is not None  # a model that a server holds
        }

    def _open(self, directory: Path, *, trains: bool) -> Model:
        network = load_network(self.family, directory)
        network.requires_grad_(trains)
        if trains and self.args.gradient_checkpointing:
            self.modality.recompute(network)
        dtype = self.compute.dtype
        sharded = shard(network, self.family.blocks(network), self.mesh, dtype)
        return self.modality.model(self.family, sharded, dtype)

    def _fresh_modules(self, plan: DistillationPlan) -> dict[str, nn.Module]:
        """Modules that no pipeline directory holds, equal on every rank: each role has a seed of its own."""
        fresh = {}
        for role in plan.roles_of(self.group):
            if role in self.loss_type.modules:
                build: BuildModule = registry.resolve(self.loss_type.modules[role])
                with torch.random.fork_rng(devices=()):
                    torch.manual_seed(seeds.derive(self.args.seed, "module", role))
                    module = build(self.models, self.args.loss_options)
                fresh[role] = shard(module, (), self.mesh, torch.float32)
        return fresh

    @property
    def state(self) -> TrainerState:
        """State that a checkpoint holds. A frozen network is not in it: its files are."""
        return TrainerState({role: trained.state for role, trained in self.trained.items()})

    # -- one optimizer step ---------------------------------------------------------------------------------------

    def train(self, batch: Batch, external: Mapping[str, ExternalData], roles: Sequence[str] = ()) -> TrainReport:
        """One optimizer step of each of ``roles`` (all that train here) on this rank's samples, or an agreed skip."""
        started = time.perf_counter()
        stepping = [self.trained[role] for role in roles or self.trained]
        batch = self._ready(batch)
        metrics, nonfinite = self._accumulate(batch, external, tuple(trained.role for trained in stepping))
        for trained in stepping:
            trained.optimizer.collect_gradients()
            own = {"grad_norm": trained.optimizer.clip(self.args.clip_grad).item(), "lr": trained.lr}
            metrics |= self._named(trained.role, own)
        applied = self._all_finite(nonfinite, metrics)
        if applied:
            for trained in stepping:
                metrics |= self._named(trained.role, trained.step())
        for trained in self.trained.values():  # also of a role that another one's objective has reached
            trained.optimizer.zero_grad()
        return TrainReport(
            weight=batch.weight,
            metrics=metrics,
            nonfinite=nonfinite,
            applied=applied,
            seconds=time.perf_counter() - started,
            peak_memory=peak_memory_bytes(self.compute.device),
        )

    def _accumulate(
        self, batch: Batch, external: Mapping[str, ExternalData], roles: Sequence[str]
    ) -> tuple[dict[str, float], int]:
        objectives = self.loss_type.objectives_of(roles)
        calls = [
            (
                self.loss_type.metric_prefix(served, roles),
                self._objective(name),
                self._required(batch, external, served),
            )
            for name, served in objectives.items()
        ]
        totals: dict[str, float] = {}
        nonfinite, whole = 0, self._weight_of_a_rank(batch)
        for rows in micro_batches(len(batch), self.args.micro_batch_size):
            part = batch.take(rows)
            loss, metrics, odd = self._losses(calls, part)
            (loss * (part.weight / whole)).backward()
            nonfinite += odd
            for name, value in metrics.items():
                totals[name] = totals.get(name, 0.0) + float(value) * (part.weight / batch.weight)
        return totals, nonfinite

    def _weight_of_a_rank(self, batch: Batch) -> float:
        """The mean over ranks of their batches' weights. A micro-batch weighs by its share of that: FSDP takes the mean
        over ranks as if each had the same, and neither the split into micro-batches nor that into ranks may change
        anything."""
        total = torch.tensor(float(batch.weight), dtype=torch.float64, device=self.compute.device)
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    def _losses(
        self, calls: Sequence[tuple[str, Objective, Mapping[str, ExternalData]]], part: Batch
    ) -> tuple[Tensor, dict[str, Tensor], int]:
        """The sum of the objectives on a micro-batch, their metrics and how many entries were not finite."""
        metrics: dict[str, Tensor] = {}
        losses, nonfinite = [], 0
        for prefix, objective, scores in calls:
            tensors = {
                producer: data.require(tuple(data.tensors), part.ids, part.policy_version).tensors
                for producer, data in scores.items()
            }
            output = objective(self.models, part, tensors, self.args.loss_options)
            losses.append(output.loss)
            nonfinite += int(output.nonfinite)
            own = {"loss": output.loss.detach(), **output.metrics}
            metrics |= {name if "/" in name else prefix + name: value for name, value in own.items()}
        total = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
        return total, {**metrics, "loss": total.detach()}, nonfinite

    def _objective(self, name: str) -> Objective:
        objective: Objective = registry.resolve(name)
        return objective

    def _named(self, role: str, metrics: Mapping[str, float]) -> dict[str, float]:
        """Numbers of one role; where several train in this group they carry its name."""
        return dict(metrics) if len(self.trained) == 1 else {f"{role}/{name}": v for name, v in metrics.items()}

    def _all_finite(self, nonfinite: int, metrics: Mapping[str, float]) -> bool:
        """True where every rank saw only finite numbers; one that did not makes all of them skip."""
        decisive = (value for name, value in metrics.items() if name.rpartition("/")[2] in ("loss", "grad_norm"))
        bad = nonfinite > 0 or not all(map(_is_finite, decisive))
        flag = torch.tensor([float(bad)], device=self.compute.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return flag.item() == 0

    # -- what others ask of this group ------------------------------------------------------------------------------

    @torch.no_grad()
    def score(self, batch: Batch) -> ExternalData:
        """External data of this group about this rank's samples, on the CPU: numbers in fp32, ids as they are."""
        scorer: Scorer = registry.resolve(self.loss_type.scorers[self.group])
        batch = self._ready(batch)
        parts = [
            ExternalData(self.group, part.ids, part.policy_version, self._scores(scorer, part))
            for rows in micro_batches(len(batch), self.args.micro_batch_size)
            for part in [batch.take(rows)]
        ]
        return ExternalData.join(parts)

    def _scores(self, scorer: Scorer, part: Batch) -> dict[str, Tensor]:
        found, said = scorer(self.models, part, self.args.loss_options), self.loss_type.tells[self.group]
        if set(found) != set(said):
            raise ExternalDataError(
                f"{self.group!r} tells {', '.join(sorted(found)) or 'nothing'}, and the loss type says that it tells "
                f"{', '.join(sorted(said))}; make its tells and its scorer agree"
            )
        return {name: _on_host(value) for name, value in found.items()}

    def weights(self, role: str, *, averaged: bool = False) -> Iterator[dict[str, Tensor]]:
        """Full trained parameters of ``role``; see ``Trained.weights``."""
        return self.trained[role].weights(averaged=averaged)

    # -- what objectives read -----------------------------------------------------------------------------------------

    def _ready(self, batch: Batch) -> Batch:
        return self.modality.ready(batch, self.prompts, self.family, self.compute.device)

    def _required(
        self, batch: Batch, external: Mapping[str, ExternalData], roles: Sequence[str]
    ) -> dict[str, ExternalData]:
        needs = self.loss_type.needs_of(roles)
        if missing := needs.keys() - external.keys():
            raise ExternalDataError(
                f"{self.group!r} was asked to train without external data of {', '.join(sorted(missing))}, which score "
                "each batch first"
            )
        return {
            producer: external[producer].require(keys, batch.ids, batch.policy_version)
            for producer, keys in needs.items()
        }


def _network(model: Model | nn.Module) -> nn.Module:
    return model if isinstance(model, nn.Module) else model.network


def _on_host(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value  # ExternalData tells of it
    return value.float().cpu() if value.is_floating_point() else value.cpu()


def _is_finite(value: float) -> bool:
    return value == value and abs(value) != float("inf")
