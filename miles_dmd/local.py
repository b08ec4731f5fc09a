"""Run in one process, without Ray: for debugging, and the reference for the Ray run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from miles_dmd import registry
from miles_dmd.checkpoint.manifest import FileEntry
from miles_dmd.contracts.engine import Serve
from miles_dmd.contracts.external import ExternalData
from miles_dmd.contracts.loss import LossType
from miles_dmd.contracts.reports import TrainReport
from miles_dmd.contracts.samples import DenoisingBatch
from miles_dmd.errors import ConfigError, noting
from miles_dmd.executor import StartedRun
from miles_dmd.generators import seed_globals
from miles_dmd.handles import BatchHandle, ScoreHandle, WeightHandle
from miles_dmd.network.conditions import PromptTable
from miles_dmd.network.encoding import ensure_table
from miles_dmd.observe.count import Count
from miles_dmd.plan import DistillationPlan
from miles_dmd.rollout import RolloutWorker
from miles_dmd.training.compute import Compute, choose_compute, prepare_process
from miles_dmd.training.trainer import Trainer


class LocalGroup:
    """A trainer group of one rank: the trainer itself."""

    size = 1

    def __init__(self, name: str, trainer: Trainer) -> None:
        self.name, self.trainer = name, trainer

    def train(self, batch: BatchHandle, scores: Mapping[str, ScoreHandle], roles: Sequence[str]) -> list[TrainReport]:
        external = {producer: ExternalData.join(handle.parts) for producer, handle in scores.items()}
        with noting(f"{self.name} rank 0", "training"):
            return [self.trainer.train(DenoisingBatch.join(batch.chunks), external, roles)]

    def score(self, batch: BatchHandle) -> ScoreHandle:
        with noting(f"{self.name} rank 0", "scoring"):
            return ScoreHandle(self.name, (self.trainer.score(DenoisingBatch.join(batch.chunks)),))

    def weights(self, role: str, *, averaged: bool) -> WeightHandle:
        return WeightHandle(self.trainer.weights(role, averaged=averaged))

    def save(self, directory: Path) -> list[FileEntry]:
        with noting(f"{self.name} rank 0", "saving"):
            return self.trainer.state.save(directory)

    def load(self, directory: Path) -> None:
        with noting(f"{self.name} rank 0", "loading a checkpoint"):
            self.trainer.state.load(directory)


@contextlib.contextmanager
def started(
    args: Any,
    group_args: Mapping[str, Any],
    *,
    plan: DistillationPlan,
    loss_type: LossType,
    texts: Sequence[str],
    horizons: Mapping[str, int],
) -> Iterator[StartedRun]:
    """Trainer groups and rollout worker, all in this process."""
    for name, own in group_args.items():
        if own.num_trainer_ranks != 1:
            raise ConfigError(
                f"--local runs one rank a group, and {name} asks for {own.num_trainer_ranks}; drop one of them"
            )
    computes = {name: choose_compute(args.device, own.compute_dtype) for name, own in group_args.items()}
    compute = computes[plan.group_of("student")]
    prepare_process(args.cpu_threads)
    seed_globals(args.seed, "local")
    init_single_rank(compute)
    prompts = PromptTable(ensure_table(args, texts, compute.device))
    shared: dict[str, Any] = {"plan": plan, "loss_type": loss_type, "prompts": prompts}
    with contextlib.ExitStack() as stack:
        student = group_args[plan.group_of("student")]  # the engine samples from it, so it reads what it reads
        servers = start_servers(student, compute, stack)
        worker = RolloutWorker(student, compute=compute, prompts=prompts, texts=texts, servers=servers)
        stack.callback(worker.close)
        for note in worker.engine.notes:
            print(note, flush=True)
        worker.sleep()  # engine and trainers load in turn, as they take turns on the device ever after
        print("Loading models ...", flush=True)
        groups, count = {}, Count("trainer groups that have loaded models", len(group_args))
        for name, own in group_args.items():
            trainer = Trainer(own, name, horizons=horizons, compute=computes[name], **shared)
            groups[name] = LocalGroup(name, trainer)
            count.at(len(groups))
        yield StartedRun(groups, worker)


def start_servers(args: Any, compute: Compute, stack: contextlib.ExitStack) -> list[str]:
    """The addresses of the servers that the rollout engine speaks to, if it has any of its own, started in turn on one
    device; they end with ``stack``."""
    engine = registry.load("engines", args.rollout_engine)
    urls: list[str] = []
    for number in range(engine.num_servers(args)):
        serve: Serve = registry.resolve(engine.serve)
        server = serve(args, device=compute.device.type, number=number, host="127.0.0.1")
        stack.callback(server.close)
        urls.append(server.wait())
    return urls


def init_single_rank(compute: Compute) -> None:
    """A process group of this process alone, which FSDP needs; nothing listens on a port for it."""
    if not dist.is_initialized():
        dist.init_process_group(compute.backend, store=dist.HashStore(), rank=0, world_size=1)
