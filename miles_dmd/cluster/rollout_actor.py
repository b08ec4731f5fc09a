"""Rollout worker as a Ray actor, and its proxy for the driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from miles_dmd.cluster.feed import Fed
from miles_dmd.cluster.placement import Placement
from miles_dmd.cluster.waiting import Supervisor
from miles_dmd.cluster.watched import GROUP, Watched, actor_class
from miles_dmd.contracts.distillation import Distillation
from miles_dmd.contracts.engine import RolloutRequest
from miles_dmd.contracts.reports import ExportReport
from miles_dmd.executor import ROLLOUT, Pictures
from miles_dmd.generators import seed_globals
from miles_dmd.handles import BatchHandle, WeightHandle

if TYPE_CHECKING:
    from miles_dmd.checkpoint.manifest import FileEntry
    from miles_dmd.config.args import Args
    from miles_dmd.rollout import RolloutWorker


class RolloutActor(Watched):
    _fed: Fed | None = None
    """Takes weights that are on their way."""

    def encode(self, args: Args, device: str, texts: Sequence[str]) -> str:
        """Path of the prompts' table. Encoders are loaded and dropped here, before anything else needs the memory."""
        from miles_dmd.network.encoding import ensure_table
        from miles_dmd.training.compute import choose_compute, prepare_process, release_cached_memory

        prepare_process(args.cpu_threads)
        table = ensure_table(args, texts, choose_compute(device, args.compute_dtype).device)
        release_cached_memory()
        return str(table)

    def build(self, args: Args, device: str, prompt_table: str, texts: Sequence[str], servers: Sequence[str]) -> None:
        from miles_dmd.cluster.arrays import send_tensors_as_arrays
        from miles_dmd.network.conditions import PromptTable
        from miles_dmd.rollout import RolloutWorker
        from miles_dmd.training.compute import choose_compute, prepare_process

        send_tensors_as_arrays()
        prepare_process(args.cpu_threads)
        seed_globals(args.seed, "rollout")
        compute = choose_compute(device, args.compute_dtype)
        prompts = PromptTable(Path(prompt_table))
        self.worker: RolloutWorker = RolloutWorker(args, compute=compute, prompts=prompts, texts=texts, servers=servers)

    def call(self, method: str, *parameters: Any) -> Any:
        """A method of the worker whose parameters and result are plain values."""
        return getattr(self.worker, method)(*parameters)

    def batches(self, method: str, sources: Sequence[Any], num_chunks: int) -> Any:
        """(ids, policy version) of each batch that a method of the worker makes of ``sources``, then all chunks: Ray
        objects of their own, of which the driver opens the first alone."""
        handles: list[BatchHandle] = getattr(self.worker, method)(sources, num_chunks)
        about = [(handle.ids, handle.policy_version) for handle in handles]
        return about, *chain.from_iterable(handle.chunks for handle in handles)

    def save_batches(self, batches: Sequence[BatchHandle], directory: Path) -> list[FileEntry]:
        here = [replace(batch, chunks=tuple(ray.get(list(batch.chunks)))) for batch in batches]
        return self.worker.save_batches(here, directory)

    def feed(self, method: str, bucket: Mapping[str, Any], last: bool, *parameters: Any) -> Any:
        """A method of the worker that takes weights, of which this is one bucket; it runs until the ``last``, which
        returns what it returns."""
        if self._fed is None:
            self._fed = Fed(lambda buckets: getattr(self.worker, method)(WeightHandle(buckets), *parameters))
        fed, self._fed = self._fed, None  # a failure ends it
        fed.put(bucket)
        if last:
            return fed.finish()
        self._fed = fed
        return None

    def notes(self) -> tuple[str, ...]:
        return tuple(self.worker.engine.notes)

    @ray.method(concurrency_group=GROUP)  # type: ignore[untyped-decorator]
    def close(self) -> None:
        """Also while another thread samples, or hangs."""
        if hasattr(self, "worker"):
            self.worker.close()


class RayRollouts:
    """``executor.Rollouts`` over the actor; it shares the first bundle."""

    def __init__(self, placement: Placement, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self.actor = actor_class(RolloutActor).options(**placement.options(0)).remote()
        supervisor.watch(ROLLOUT, self.actor)

    def encode(self, args: Args, device: str, texts: Sequence[str]) -> str:
        return str(self._fetch("encoding prompts", self.actor.encode.remote(args, device, list(texts))))

    def build(
        self, args: Args, device: str, prompt_table: str, texts: Sequence[str], servers: Sequence[str]
    ) -> dict[str, ray.ObjectRef]:
        return {ROLLOUT: self.actor.build.remote(args, device, prompt_table, list(texts), list(servers))}

    def notes(self) -> tuple[str, ...]:
        return tuple(self._fetch("introducing itself", self.actor.notes.remote()))

    def generate(self, batches: Sequence[Sequence[RolloutRequest]], num_chunks: int) -> list[BatchHandle]:
        return self._batches("sampling", "generate", batches, num_chunks)

    def sleep(self) -> None:
        self._call("going to sleep", "sleep")

    def update_weights(self, weights: WeightHandle, version: int) -> None:
        self._feed("taking new weights", "update_weights", weights, version)

    def pictures(self, requests: Sequence[RolloutRequest], limit: float | None) -> Pictures:
        drawn: Pictures = self._call("drawing samples", "pictures", requests, limit)
        return drawn

    def teacher_pictures(self, requests: Sequence[RolloutRequest], sampling: Mapping[str, Any]) -> Pictures:
        drawn: Pictures = self._call("drawing the teacher's samples", "teacher_pictures", requests, dict(sampling))
        return drawn

    def export(self, weights: WeightHandle, directory: Path, distillation: Distillation) -> ExportReport:
        report: ExportReport = self._feed("exporting the student", "export", weights, directory, distillation)
        return report

    def take_exported(self, directory: Path, version: int) -> None:
        self._call("taking the exported weights", "take_exported", directory, version)

    def save_batches(self, batches: Sequence[BatchHandle], directory: Path) -> list[FileEntry]:
        entries: list[FileEntry] = self._fetch(
            "saving batches", self.actor.save_batches.remote(list(batches), directory)
        )
        return entries

    def load_batches(self, paths: Sequence[Path], num_chunks: int) -> list[BatchHandle]:
        return self._batches("loading batches", "load_batches", list(paths), num_chunks)

    def save_state(self, path: Path) -> FileEntry:
        entry: FileEntry = self._call("saving its random state", "save_state", path)
        return entry

    def load_state(self, path: Path) -> None:
        self._call("loading its random state", "load_state", path)

    def peak_memory(self) -> int:
        return int(self._call("reporting its memory", "peak_memory"))

    def _call(self, doing: str, method: str, *parameters: Any) -> Any:
        return self._fetch(doing, self.actor.call.remote(method, *parameters))

    def _feed(self, doing: str, method: str, weights: WeightHandle, *parameters: Any) -> Any:
        for bucket, last in weights.buckets:
            told = self._fetch(doing, self.actor.feed.remote(method, bucket, last, *parameters))
        return told

    def _batches(self, doing: str, method: str, sources: Sequence[Any], num_chunks: int) -> list[BatchHandle]:
        count = len(sources) * num_chunks
        call = self.actor.batches.options(num_returns=1 + count).remote(method, sources, num_chunks)
        about, *chunks = call if count else [call]  # one result is no sequence
        told = self._fetch(doing, about)
        if not count:
            return []
        return [
            BatchHandle(ids, version, tuple(chunks[number * num_chunks : (number + 1) * num_chunks]))
            for number, (ids, version) in enumerate(told)
        ]

    def _fetch(self, doing: str, ref: ray.ObjectRef) -> Any:
        return self.supervisor.fetch(ref, ROLLOUT, doing)

    def closing(self) -> list[ray.ObjectRef]:
        """What the engine holds elsewhere: files, the memory of servers that others go on using."""
        return [self.actor.close.remote()]

    def kill(self) -> None:
        ray.kill(self.actor)
