"""A whole run in this process, without Ray: for debugging, and the reference that the Ray run is compared with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from miles_dmd import registry
from miles_dmd.checkpoint.manifest import FileEntry
from miles_dmd.contracts.distillation import Distillation
from miles_dmd.contracts.engine import RolloutRequest, Server
from miles_dmd.contracts.external import ExternalData
from miles_dmd.contracts.loss import LossType
from miles_dmd.contracts.reports import ExportReport, SampleStatistics, TrainReport
from miles_dmd.contracts.samples import DenoisingBatch
from miles_dmd.errors import ConfigError
from miles_dmd.handles import BatchHandle, ScoreHandle, WeightHandle
from miles_dmd.network.conditions import PromptTable, ensure_table
from miles_dmd.plan import DistillationPlan
from miles_dmd.rollout import RolloutWorker
from miles_dmd.training.compute import Compute, choose_compute, prepare_process
from miles_dmd.training.trainer import Trainer

ROLLOUT = "the rollout worker"


@contextlib.contextmanager
def named(who: str, doing: str) -> Iterator[None]:
    """An error keeps its kind here, and gets a note that says what a Ray run's ClusterError says."""
    try:
        yield
    except Exception as error:
        error.add_note(f"{who}, while {doing}")
        raise


class LocalGroup:
    """A trainer group of one rank: the trainer itself."""

    size = 1

    def __init__(self, name: str, trainer: Trainer) -> None:
        self.name, self.trainer = name, trainer

    def train(self, batch: BatchHandle, scores: Mapping[str, ScoreHandle]) -> list[TrainReport]:
        external = {producer: ExternalData.join(handle.parts) for producer, handle in scores.items()}
        with named(f"{self.name} rank 0", "training"):
            return [self.trainer.train(DenoisingBatch.join(batch.chunks), external)]

    def score(self, batch: BatchHandle) -> ScoreHandle:
        with named(f"{self.name} rank 0", "scoring"):
            return ScoreHandle(self.name, (self.trainer.score(DenoisingBatch.join(batch.chunks)),))

    def weights(self, *, averaged: bool) -> WeightHandle:
        return WeightHandle(self.trainer.weights(averaged=averaged))

    def save(self, directory: Path) -> list[FileEntry]:
        with named(f"{self.name} rank 0", "saving"):
            return self.trainer.state.save(directory)

    def load(self, directory: Path) -> None:
        with named(f"{self.name} rank 0", "loading a checkpoint"):
            self.trainer.state.load(directory)


class LocalRollouts:
    def __init__(self, worker: RolloutWorker) -> None:
        self.worker = worker

    def generate(self, batches: Sequence[Sequence[RolloutRequest]], num_chunks: int) -> list[BatchHandle]:
        with named(ROLLOUT, "sampling"):
            return [_handle(chunks) for chunks in self.worker.generate(batches, num_chunks)]

    def save_batches(self, batches: Sequence[BatchHandle], directory: Path) -> list[FileEntry]:
        return self.worker.save_batches([DenoisingBatch.join(batch.chunks) for batch in batches], directory)

    def load_batches(self, paths: Sequence[Path], num_chunks: int) -> list[BatchHandle]:
        return [_handle(chunks) for chunks in self.worker.load_batches(paths, num_chunks)]

    def sleep(self) -> None:
        self.worker.sleep()

    def update_weights(self, weights: WeightHandle, version: int) -> None:
        with named(ROLLOUT, "taking new weights"):
            self.worker.update_weights(weights.buckets, version)

    def pictures(self, requests: Sequence[RolloutRequest], limit: float | None) -> tuple[Any, SampleStatistics]:
        with named(ROLLOUT, "drawing samples"):
            return self.worker.pictures(requests, limit)

    def teacher_pictures(
        self, requests: Sequence[RolloutRequest], sampling: Mapping[str, Any]
    ) -> tuple[Any, SampleStatistics]:
        return self.worker.teacher_pictures(requests, sampling)

    def export(self, directory: Path, weights: WeightHandle, distillation: Distillation) -> ExportReport:
        with named(ROLLOUT, "exporting the student"):
            return self.worker.export(directory, weights.buckets, distillation)

    def take_exported(self, directory: Path, version: int) -> None:
        with named(ROLLOUT, "taking the exported weights"):
            self.worker.take_exported(directory, version)

    def peak_memory(self) -> int:
        return self.worker.peak_memory()


def _handle(chunks: Sequence[DenoisingBatch]) -> BatchHandle:
    return BatchHandle(tuple(i for chunk in chunks for i in chunk.ids), chunks[0].policy_version, tuple(chunks))


@contextlib.contextmanager
def started(
    args: Any,
    group_args: Mapping[str, Any],
    *,
    plan: DistillationPlan,
    loss_type: LossType,
    texts: Sequence[str],
    horizons: Mapping[str, int],
) -> Iterator[tuple[dict[str, LocalGroup], LocalRollouts]]:
    """Trainer groups by name and the rollout worker, all in this process."""
    for name, own in group_args.items():
        if own.num_trainer_ranks != 1:
            raise ConfigError(
                f"--local runs one rank a group, and {name} asks for {own.num_trainer_ranks}; drop one of them"
            )
    computes = {name: choose_compute(args.device, own.compute_dtype) for name, own in group_args.items()}
    compute = computes[plan.group_of("student")]
    prepare_process(args.cpu_threads)
    init_single_rank(compute)
    prompts = PromptTable(ensure_table(args, texts, compute.device))
    shared: dict[str, Any] = {"plan": plan, "loss_type": loss_type, "prompts": prompts}
    with contextlib.ExitStack() as stack:
        student = group_args[plan.group_of("student")]  # the engine samples from it, so it reads what it reads
        servers = start_servers(student, compute, stack)
        groups = {
            name: LocalGroup(name, Trainer(own, name, horizon=horizons[name], compute=computes[name], **shared))
            for name, own in group_args.items()
        }
        for server in servers:
            server.wait()
        worker = RolloutWorker(student, compute=compute, prompts=prompts, texts=texts, servers=[s.url for s in servers])
        stack.callback(worker.close)
        for note in worker.engine.notes:
            print(note, flush=True)
        yield groups, LocalRollouts(worker)


def start_servers(args: Any, compute: Compute, stack: contextlib.ExitStack) -> list[Server]:
    """The servers that the rollout engine speaks to, if it has any of its own; they end with ``stack``."""
    engine = registry.load("engines", args.rollout_engine)
    servers: list[Server] = []
    for number in range(engine.num_servers(args)):
        serve = registry.resolve(engine.serve)
        servers.append(serve(args, device=compute.device.type, number=number, host="127.0.0.1"))
        stack.callback(servers[-1].close)
    return servers


def init_single_rank(compute: Compute) -> None:
    """A process group of this process alone, which FSDP needs; nothing listens on a port for it."""
    if not dist.is_initialized():
        dist.init_process_group(compute.backend, store=dist.HashStore(), rank=0, world_size=1)
