"""The rollout worker as a Ray actor, and its face towards the driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
from miles_dmd.contracts.reports import ExportReport, SampleStatistics
from miles_dmd.handles import BatchHandle, WeightHandle

if TYPE_CHECKING:
    from torch import Tensor

    from miles_dmd.checkpoint.manifest import FileEntry
    from miles_dmd.contracts.samples import DenoisingBatch
    from miles_dmd.rollout import RolloutWorker

WHO = "the rollout worker"


class RolloutActor(Watched):
    _fed: Fed | None = None
    """Takes weights that are on their way."""

    def encode(self, args: Any, device: str, texts: Sequence[str]) -> str:
        """Path of the prompts' table. Encoders are loaded and dropped here, before anything else needs the memory."""
        from miles_dmd.network.conditions import ensure_table
        from miles_dmd.training.compute import choose_compute, prepare_process, release_cached_memory

        prepare_process(args.cpu_threads)
        table = ensure_table(args, texts, choose_compute(device, args.compute_dtype).device)
        release_cached_memory()
        return str(table)

    def build(self, args: Any, device: str, prompt_table: str, texts: Sequence[str], servers: Sequence[str]) -> None:
        from miles_dmd.cluster.arrays import send_tensors_as_arrays
        from miles_dmd.network.conditions import PromptTable
        from miles_dmd.rollout import RolloutWorker
        from miles_dmd.training.compute import choose_compute, prepare_process

        send_tensors_as_arrays()
        prepare_process(args.cpu_threads)
        compute = choose_compute(device, args.compute_dtype)
        prompts = PromptTable(Path(prompt_table))
        self.worker: RolloutWorker = RolloutWorker(args, compute=compute, prompts=prompts, texts=texts, servers=servers)

    def generate(self, batches: Sequence[Sequence[RolloutRequest]], num_chunks: int) -> Any:
        """One result a chunk, batch after batch, behind who the batches are."""
        return _results(self.worker.generate(batches, num_chunks))

    def save_batches(self, batches: Sequence[BatchHandle], directory: Path) -> list[FileEntry]:
        from miles_dmd.contracts.samples import DenoisingBatch

        whole = [DenoisingBatch.join(ray.get(list(batch.chunks))) for batch in batches]
        return self.worker.save_batches(whole, directory)

    def load_batches(self, paths: Sequence[Path], num_chunks: int) -> Any:
        return _results(self.worker.load_batches(paths, num_chunks))

    def notes(self) -> tuple[str, ...]:
        return tuple(self.worker.engine.notes)

    def sleep(self) -> None:
        self.worker.sleep()

    @ray.method(concurrency_group=GROUP)  # type: ignore[untyped-decorator]
    def close(self) -> None:
        """Also while another thread samples, or hangs."""
        if hasattr(self, "worker"):
            self.worker.close()

    def update_weights(self, bucket: Mapping[str, Any], last: bool, version: int) -> None:
        self._feed(lambda buckets: self.worker.update_weights(buckets, version), bucket, last)

    def pictures(self, requests: Sequence[RolloutRequest], limit: float | None) -> tuple[Any, SampleStatistics]:
        return self.worker.pictures(requests, limit)

    def teacher_pictures(
        self, requests: Sequence[RolloutRequest], sampling: Mapping[str, Any]
    ) -> tuple[Any, SampleStatistics]:
        return self.worker.teacher_pictures(requests, sampling)

    def export(
        self, bucket: Mapping[str, Tensor], last: bool, directory: Path, distillation: Distillation
    ) -> ExportReport | None:
        """The report comes with the last bucket."""
        report: ExportReport | None = self._feed(
            lambda buckets: self.worker.export(directory, buckets, distillation), bucket, last
        )
        return report

    def take_exported(self, directory: Path, version: int) -> None:
        self.worker.take_exported(directory, version)

    def _feed(self, use: Callable[[Iterator[Any]], Any], bucket: Mapping[str, Tensor], last: bool) -> Any:
        """What ``use`` returns, with the last bucket."""
        if self._fed is None:
            self._fed = Fed(use)
        fed, self._fed = self._fed, None  # a failure ends it
        fed.put(bucket)
        if last:
            return fed.finish()
        self._fed = fed
        return None

    def peak_memory(self) -> int:
        return self.worker.peak_memory()


def _results(batches: Sequence[Sequence[DenoisingBatch]]) -> tuple[Any, ...]:
    """(ids, policy version) of each batch, then all chunks: Ray objects of their own, of which the driver opens the
    first alone."""
    about = [(tuple(i for chunk in chunks for i in chunk.ids), chunks[0].policy_version) for chunks in batches]
    return about, *chain.from_iterable(batches)


class RayRollouts:
    """``executor.Rollouts`` over the actor; it shares the first bundle."""

    def __init__(self, placement: Placement, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self.actor = actor_class(RolloutActor).options(**placement.options(0)).remote()
        supervisor.watch(WHO, self.actor)

    def encode(self, args: Any, device: str, texts: Sequence[str]) -> str:
        return str(self._call("encoding prompts", "encode", args, device, list(texts)))

    def build(
        self, args: Any, device: str, prompt_table: str, texts: Sequence[str], servers: Sequence[str]
    ) -> dict[str, ray.ObjectRef]:
        return {WHO: self.actor.build.remote(args, device, prompt_table, list(texts), list(servers))}

    def generate(self, batches: Sequence[Sequence[RolloutRequest]], num_chunks: int) -> list[BatchHandle]:
        return self._batches("sampling", "generate", batches, num_chunks)

    def notes(self) -> tuple[str, ...]:
        return tuple(self._call("introducing itself", "notes"))

    def sleep(self) -> None:
        self._call("going to sleep", "sleep")

    def update_weights(self, weights: WeightHandle, version: int) -> None:
        for bucket, last in weights.buckets:
            self._call("taking new weights", "update_weights", bucket, last, version)

    def pictures(self, requests: Sequence[RolloutRequest], limit: float | None) -> tuple[Any, SampleStatistics]:
        drawn: tuple[Any, SampleStatistics] = self._call("drawing samples", "pictures", requests, limit)
        return drawn

    def teacher_pictures(
        self, requests: Sequence[RolloutRequest], sampling: Mapping[str, Any]
    ) -> tuple[Any, SampleStatistics]:
        drawn: tuple[Any, SampleStatistics] = self._call(
            "drawing the teacher's samples", "teacher_pictures", requests, dict(sampling)
        )
        return drawn

    def export(self, directory: Path, weights: WeightHandle, distillation: Distillation) -> ExportReport:
        for bucket, last in weights.buckets:
            told = self._call("exporting the student", "export", bucket, last, directory, distillation)
        report: ExportReport = told
        return report

    def take_exported(self, directory: Path, version: int) -> None:
        self._call("taking the exported weights", "take_exported", directory, version)

    def save_batches(self, batches: Sequence[BatchHandle], directory: Path) -> list[FileEntry]:
        entries: list[FileEntry] = self._call("saving batches", "save_batches", list(batches), directory)
        return entries

    def load_batches(self, paths: Sequence[Path], num_chunks: int) -> list[BatchHandle]:
        return self._batches("loading batches", "load_batches", list(paths), num_chunks)

    def peak_memory(self) -> int:
        return int(self._call("reporting its memory", "peak_memory"))

    def _batches(self, doing: str, method: str, sources: Sequence[Any], num_chunks: int) -> list[BatchHandle]:
        if not sources:  # Ray would hand over one result as no sequence at all
            return []
        call = getattr(self.actor, method).options(num_returns=1 + len(sources) * num_chunks)
        about, *chunks = call.remote(sources, num_chunks)
        return [
            BatchHandle(ids, version, tuple(chunks[number * num_chunks : (number + 1) * num_chunks]))
            for number, (ids, version) in enumerate(self.supervisor.fetch(about, WHO, doing))
        ]

    def _call(self, doing: str, method: str, *parameters: Any) -> Any:
        return self.supervisor.fetch(getattr(self.actor, method).remote(*parameters), WHO, doing)

    def closing(self) -> list[ray.ObjectRef]:
        """What the engine holds elsewhere: files, the memory of servers that others go on using."""
        return [self.actor.close.remote()]

    def kill(self) -> None:
        ray.kill(self.actor)
