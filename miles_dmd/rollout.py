"""Rollout worker: an engine, and what turns its samples into batches and shows them. Knows no Ray."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_dmd import registry
from miles_dmd.checkpoint.manifest import FileEntry, entry_of
from miles_dmd.checkpoint.records import restore_generators
from miles_dmd.contracts.batch import Batch, join
from miles_dmd.contracts.batch_file import read_batch, write_batch
from miles_dmd.contracts.engine import BuildEngine, RolloutEngine, RolloutRequest
from miles_dmd.contracts.modality import Shown
from miles_dmd.contracts.reports import ExportReport
from miles_dmd.contracts.student import StudentRecord
from miles_dmd.errors import EngineError, SaveError, noting
from miles_dmd.executor import ROLLOUT
from miles_dmd.files import write_synced
from miles_dmd.generators import random_state
from miles_dmd.handles import BatchHandle, WeightHandle
from miles_dmd.sampling.partition import rows_of_rank
from miles_dmd.training.compute import Compute, peak_memory_bytes

if TYPE_CHECKING:
    from miles_dmd.config.args import Args


class RolloutWorker:
    """``executor.Rollouts`` in this process: handles hold the batches and weights themselves.

    Awake when it is built. Whatever needs the engine wakes it; batches are the last that a cycle wants of it, so it
    sleeps when they are out: once a cycle each, and no call of their own.

    ``prompts`` are what the modality has prepared of ``texts``; ``servers`` are those started for the engine, if it has
    any."""

    def __init__(
        self,
        args: Args,
        *,
        compute: Compute,
        prompts: Any,
        texts: Sequence[str] = (),
        servers: Sequence[str] = (),
    ) -> None:
        self.args, self.compute = args, compute
        modality = registry.load("losses", args.loss_type).modality
        self.modality = registry.load("modalities", modality).torch()
        self.studio = self.modality.studio(args, compute, prompts, texts)
        build: BuildEngine = registry.resolve(registry.load("engines", args.rollout_engine).builds[modality])
        self.engine = build(args, compute=compute, prompts=prompts, texts=texts, servers=servers)
        self._asleep = False

    @noting(ROLLOUT, "sampling")
    def generate(self, batches: Sequence[Sequence[RolloutRequest]], num_chunks: int) -> list[BatchHandle]:
        """Several batches in one engine call, each cut into ``num_chunks`` equal chunks. Then the engine sleeps."""
        requests = [request for batch in batches for request in batch]
        whole = self._awake().generate(requests)
        if whole.ids != tuple(request.sample_id for request in requests):
            raise EngineError(f"the engine returned samples {whole.ids[:4]}..., asked for {requests[0].sample_id}...")
        result, start = [], 0
        for batch in batches:
            result.append(_handle(whole.take(range(start, start + len(batch))), num_chunks))
            start += len(batch)
        self.sleep()
        return result

    def sleep(self) -> None:
        """The engine leaves the device to trainers."""
        if not self._asleep:
            self.engine.sleep()
            self._asleep = True

    def _awake(self) -> RolloutEngine:
        if self._asleep:
            self.engine.wake()
            self._asleep = False
        return self.engine

    @noting(ROLLOUT, "saving batches")
    def save_batches(self, batches: Sequence[BatchHandle], directory: Path) -> list[FileEntry]:
        """One file each into ``directory``, which exists; paths below its parent. Raises SaveError."""
        paths = [directory / f"batch_{number:03d}.safetensors" for number in range(len(batches))]
        try:
            for path, batch in zip(paths, batches, strict=True):
                write_batch(path, join(batch.chunks))
            return [entry_of(path, directory.parent) for path in paths]
        except OSError as error:
            raise SaveError(f"{directory}: {error.strerror}") from error

    @noting(ROLLOUT, "loading batches")
    def load_batches(self, paths: Sequence[Path], num_chunks: int) -> list[BatchHandle]:
        """Load batches from files, as ``generate`` gives them; the engine sleeps afterwards, too."""
        self.sleep()
        return [_handle(read_batch(path, self.modality.batch), num_chunks) for path in paths]

    @noting(ROLLOUT, "saving its random state")
    def save_state(self, path: Path) -> FileEntry:
        """The random state of this process. Raises SaveError."""
        try:
            write_synced(path, json.dumps(random_state(), allow_nan=False).encode())
            return entry_of(path, path.parent)
        except OSError as error:
            raise SaveError(f"{path}: {error.strerror}") from error

    @noting(ROLLOUT, "loading its random state")
    def load_state(self, path: Path) -> None:
        """Raises CheckpointError."""
        restore_generators(path, "torch")

    @noting(ROLLOUT, "taking new weights")
    def update_weights(self, weights: WeightHandle, version: int) -> None:
        """Sample from these weights from now on. The engine stays awake: whoever hands them over samples next."""
        self._awake().update_weights(weights.buckets, version)

    @noting(ROLLOUT, "drawing samples")
    def show(self, requests: Sequence[RolloutRequest], reference: Any) -> Shown:
        """Finished samples as the modality shows them, and numbers about them, relative to ``reference``."""
        return self.studio.show(self._awake(), requests, reference)

    @noting(ROLLOUT, "drawing the teacher's samples")
    def show_teacher(self, requests: Sequence[RolloutRequest], sampling: Mapping[str, Any]) -> Shown:
        """The same of the teacher, sampled as ``sampling`` says."""
        self.sleep()  # the teacher takes the engine's place on the device
        return self.studio.show_teacher(requests, sampling)

    @noting(ROLLOUT, "exporting the student")
    def export(self, weights: WeightHandle, directory: Path, record: StudentRecord) -> ExportReport:
        """Write ``weights`` as a model that opens in stock libraries. Raises SaveError."""
        return self.studio.export(weights.buckets, directory, record)

    @noting(ROLLOUT, "taking the exported weights")
    def take_exported(self, directory: Path, version: int) -> None:
        """The engine samples from an exported student, as it was rounded."""
        self.update_weights(WeightHandle(self.studio.exported(directory)), version)

    def peak_memory(self) -> int:
        return peak_memory_bytes(self.compute.device)

    def close(self) -> None:
        self.engine.close()


def _handle(batch: Batch, num_chunks: int) -> BatchHandle:
    chunks = (batch.take(rows_of_rank(len(batch), chunk, num_chunks)) for chunk in range(num_chunks))
    return BatchHandle(batch.ids, batch.policy_version, tuple(chunks))
