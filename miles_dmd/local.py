"""Run in one process, without Ray: for debugging, and the reference for the Ray run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch.distributed as dist

from miles_dmd import registry
from miles_dmd.checkpoint.manifest import FileEntry
from miles_dmd.contracts.batch import join
from miles_dmd.contracts.engine import StartServer
from miles_dmd.contracts.external import ExternalData
from miles_dmd.contracts.reports import TrainReport
from miles_dmd.errors import noting
from miles_dmd.executor import StartedRun
from miles_dmd.generators import seed_globals
from miles_dmd.handles import BatchHandle, ScoreHandle, WeightHandle
from miles_dmd.observe.count import Count
from miles_dmd.preflight.resolved import ResolvedRun
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
            return [self.trainer.train(join(batch.chunks), external, roles)]

    def score(self, batch: BatchHandle) -> ScoreHandle:
        with noting(f"{self.name} rank 0", "scoring"):
            return ScoreHandle(self.name, (self.trainer.score(join(batch.chunks)),))

    def weights(self, role: str, *, averaged: bool) -> WeightHandle:
        return WeightHandle(self.trainer.weights(role, averaged=averaged))

    def save(self, directory: Path) -> list[FileEntry]:
        with noting(f"{self.name} rank 0", "saving"):
            return self.trainer.state.save(directory)

    def load(self, directory: Path) -> None:
        with noting(f"{self.name} rank 0", "loading a checkpoint"):
            self.trainer.state.load(directory)


@contextlib.contextmanager
def started(run: ResolvedRun, texts: Sequence[str]) -> Iterator[StartedRun]:
    """Trainer groups and rollout worker, all in this process."""
    args, student = run.args, run.student
    computes = {name: choose_compute(args.device, own.compute_dtype) for name, own in run.trainers.items()}
    compute = computes[run.plan.group_of("student")]
    prepare_process(args.cpu_threads)
    seed_globals(args.seed, "local")
    init_single_rank(compute)
    modality = run.modality.torch()
    prompts = modality.open_prompts(modality.prepare(args, texts, compute.device))
    with contextlib.ExitStack() as stack:
        servers = start_servers(run, compute, stack)
        worker = RolloutWorker(student, compute=compute, prompts=prompts, texts=texts, servers=servers)
        stack.callback(worker.close)
        for note in worker.engine.notes:
            print(note, flush=True)
        worker.sleep()  # engine and trainers load in turn, as they take turns on the device ever after
        print("Loading models ...", flush=True)
        groups, count = {}, Count("trainer groups that have loaded models", len(run.trainers))
        for name, own in run.trainers.items():
            trainer = Trainer(
                own,
                name,
                plan=run.plan,
                loss_type=run.loss_type,
                compute=computes[name],
                prompts=prompts,
                horizons=run.horizons,
            )
            groups[name] = LocalGroup(name, trainer)
            count.at(len(groups))
        yield StartedRun(groups, worker)


def start_servers(run: ResolvedRun, compute: Compute, stack: contextlib.ExitStack) -> list[str]:
    """The addresses of the servers that the rollout engine speaks to, if it has any of its own, started in turn on one
    device; they end with ``stack``."""
    urls: list[str] = []
    for number in range(run.engine.num_servers(run.student)):
        serve: StartServer = registry.resolve(run.engine.serve or "")
        server = serve(run.student, device=compute.device.type, number=number, host="127.0.0.1")
        stack.callback(server.close)
        urls.append(server.wait())
    return urls


def init_single_rank(compute: Compute) -> None:
    """A process group of this process alone, which FSDP needs; nothing listens on a port for it."""
    if not dist.is_initialized():
        dist.init_process_group(compute.backend, store=dist.HashStore(), rank=0, world_size=1)
