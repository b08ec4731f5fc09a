"""Rollout worker as a Ray actor, and its proxy for the driver."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import ray

from miles_dmd import registry
from miles_dmd.cluster.placement import Placement
from miles_dmd.cluster.supervision.waiting import Supervisor
from miles_dmd.cluster.supervision.watched import GROUP, Watched, actor_class
from miles_dmd.cluster.weight_feed import WeightFeed
from miles_dmd.contracts.engine import RolloutRequest
from miles_dmd.contracts.modality import Shown
from miles_dmd.contracts.reports import ExportReport
from miles_dmd.contracts.student import StudentRecord
from miles_dmd.executor import ROLLOUT, Rollouts
from miles_dmd.generators import seed_globals
from miles_dmd.handles import BatchHandle, WeightHandle

if TYPE_CHECKING:
    from miles_dmd.checkpoint.manifest import FileEntry
    from miles_dmd.config.args import Args
    from miles_dmd.contracts.modality import ModalityCode
    from miles_dmd.rollout import RolloutWorker

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


class RolloutActor(Watched):
    _feed: WeightFeed | None = None
    """Stream of the weights that are on their way."""

    def prepare(self, args: Args, device: str, texts: Sequence[str]) -> str:
        """Prepare the prompts, as the modality does. What that takes is gone before anything else needs memory."""
        from miles_dmd.training.compute import choose_compute, prepare_process, release_cached_memory

        prepare_process(args.cpu_threads)
        prepared = _modality(args).prepare(args, texts, choose_compute(device, args.compute_dtype).device)
        release_cached_memory()
        return prepared

    def build(self, args: Args, device: str, prepared: str, texts: Sequence[str], servers: Sequence[str]) -> None:
        from miles_dmd.cluster.arrays import send_tensors_as_arrays
        from miles_dmd.rollout import RolloutWorker
        from miles_dmd.training.compute import choose_compute, prepare_process

        send_tensors_as_arrays()
        prepare_process(args.cpu_threads)
        seed_globals(args.seed, "rollout")
        compute = choose_compute(device, args.compute_dtype)
        prompts = _modality(args).open_prompts(prepared)
        self.worker: RolloutWorker = RolloutWorker(args, compute=compute, prompts=prompts, texts=texts, servers=servers)

    def call(self, method: str, *parameters: Any, **named: Any) -> Any:
        """Call a method of the worker whose parameters and result are plain values."""
        return getattr(self.worker, method)(*parameters, **named)

    def batches(self, method: str, sources: Sequence[Any], num_chunks: int) -> Any:
        """Call a method of the worker that makes a batch of each of ``sources``. Returns (ids, policy version) of every
        batch, then all chunks: Ray objects of their own, of which the driver opens the first alone."""
        handles: list[BatchHandle] = getattr(self.worker, method)(sources, num_chunks)
        about = [(handle.ids, handle.policy_version) for handle in handles]
        return about, *chain.from_iterable(handle.chunks for handle in handles)

    def save_batches(self, batches: Sequence[BatchHandle], directory: Path) -> list[FileEntry]:
        here = [replace(batch, chunks=tuple(ray.get(list(batch.chunks)))) for batch in batches]
        return self.worker.save_batches(here, directory)

    def feed(self, method: str, bucket: Mapping[str, Any], last: bool, *parameters: Any, **named: Any) -> Any:
        """Pass one bucket to a method of the worker that takes weights, begun with the first of them; the call for the
        ``last`` returns what the method returns."""
        if self._feed is None:
            use = getattr(self.worker, method)
            self._feed = WeightFeed(lambda buckets: use(WeightHandle(buckets), *parameters, **named))
        feed, self._feed = self._feed, None  # a failure ends it
        feed.put(bucket)
        if last:
            return feed.finish()
        self._feed = feed
        return None

    def notes(self) -> tuple[str, ...]:
        return tuple(self.worker.engine.notes)

    @ray.method(concurrency_group=GROUP)  # type: ignore[untyped-decorator]
    def close(self) -> None:
        """Close the engine, also while another thread samples, or hangs."""
        if hasattr(self, "worker"):
            self.worker.close()


def _modality(args: Args) -> ModalityCode:
    return registry.load("modalities", registry.load("losses", args.loss_type).modality).torch()


class RayRollouts:
    """``executor.Rollouts`` over the actor; it shares the first bundle."""

    def __init__(self, placement: Placement, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self.actor = actor_class(RolloutActor).options(**placement.options(0)).remote()
        supervisor.watch(ROLLOUT, self.actor)

    def prepare(self, args: Args, device: str, texts: Sequence[str]) -> str:
        return str(self._fetch("encoding prompts", self.actor.prepare.remote(args, device, list(texts))))

    def build(
        self, args: Args, device: str, prepared: str, texts: Sequence[str], servers: Sequence[str]
    ) -> dict[str, ray.ObjectRef]:
        return {ROLLOUT: self.actor.build.remote(args, device, prepared, list(texts), list(servers))}

    def notes(self) -> tuple[str, ...]:
        return tuple(self._fetch("introducing itself", self.actor.notes.remote()))

    def generate(self, batches: Sequence[Sequence[RolloutRequest]], num_chunks: int) -> list[BatchHandle]:
        return self._batches("sampling", Rollouts.generate, batches, num_chunks)

    def sleep(self) -> None:
        self._call("going to sleep", Rollouts.sleep)

    def update_weights(self, weights: WeightHandle, version: int) -> None:
        self._stream("taking new weights", Rollouts.update_weights, weights, version)

    def show(self, requests: Sequence[RolloutRequest], reference: Any) -> Shown:
        return self._call("drawing samples", Rollouts.show, requests, reference)

    def show_teacher(self, requests: Sequence[RolloutRequest], sampling: Mapping[str, Any]) -> Shown:
        return self._call("drawing the teacher's samples", Rollouts.show_teacher, requests, dict(sampling))

    def export(self, weights: WeightHandle, directory: Path, record: StudentRecord) -> ExportReport:
        return self._stream("exporting the student", Rollouts.export, weights, directory, record)

    def take_exported(self, directory: Path, version: int) -> None:
        self._call("taking the exported weights", Rollouts.take_exported, directory, version)

    def save_batches(self, batches: Sequence[BatchHandle], directory: Path) -> list[FileEntry]:
        return list(self._fetch("saving batches", self.actor.save_batches.remote(list(batches), directory)))

    def load_batches(self, paths: Sequence[Path], num_chunks: int) -> list[BatchHandle]:
        return self._batches("loading batches", Rollouts.load_batches, paths, num_chunks)

    def save_state(self, path: Path) -> FileEntry:
        return self._call("saving its random state", Rollouts.save_state, path)

    def load_state(self, path: Path) -> None:
        self._call("loading its random state", Rollouts.load_state, path)

    def peak_memory(self) -> int:
        return self._call("reporting its memory", Rollouts.peak_memory)

    # The worker's methods are named by those of the protocol, so that parameters and results are checked.

    def _call(self, doing: str, method: Callable[Concatenate[Any, P], T], *parameters: P.args, **named: P.kwargs) -> T:
        result: T = self._fetch(doing, self.actor.call.remote(method.__name__, *parameters, **named))
        return result

    def _stream(
        self,
        doing: str,
        method: Callable[Concatenate[Any, WeightHandle, P], T],
        weights: WeightHandle,
        *parameters: P.args,
        **named: P.kwargs,
    ) -> T:
        result: T
        for bucket, last in weights.buckets:
            result = self._fetch(doing, self.actor.feed.remote(method.__name__, bucket, last, *parameters, **named))
        return result

    def _batches(
        self,
        doing: str,
        method: Callable[[Any, Sequence[S], int], list[BatchHandle]],
        sources: Sequence[S],
        num_chunks: int,
    ) -> list[BatchHandle]:
        count = len(sources) * num_chunks
        call = self.actor.batches.options(num_returns=1 + count).remote(method.__name__, list(sources), num_chunks)
        about, *chunks = call if count else [call]  # one result is no sequence
        told = self._fetch(doing, about)
        return [
            BatchHandle(ids, version, tuple(chunks[number * num_chunks : (number + 1) * num_chunks]))
            for number, (ids, version) in enumerate(told if count else ())
        ]

    def _fetch(self, doing: str, ref: ray.ObjectRef) -> Any:
        return self.supervisor.fetch(ref, ROLLOUT, doing)

    def closing(self) -> list[ray.ObjectRef]:
        """Let the engine release what it holds elsewhere: files, the memory of servers that others go on using."""
        return [self.actor.close.remote()]

    def kill(self) -> None:
        ray.kill(self.actor)
