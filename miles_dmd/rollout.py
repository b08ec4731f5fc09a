"""The rollout worker: an engine, and everything that turns its samples into batches and pictures. Knows no Ray."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from miles_dmd import registry
from miles_dmd.checkpoint.manifest import FileEntry, entry_of
from miles_dmd.contracts.batch_file import read_batch, write_batch
from miles_dmd.contracts.distillation import Distillation
from miles_dmd.contracts.engine import RolloutEngine, RolloutRequest
from miles_dmd.contracts.reports import ExportReport, SampleStatistics
from miles_dmd.contracts.samples import DenoisingBatch
from miles_dmd.errors import EngineError, SaveError
from miles_dmd.network.conditions import PromptTable
from miles_dmd.network.statistics import statistics
from miles_dmd.plan.partition import rows_of_rank
from miles_dmd.teacher import teacher_samples
from miles_dmd.training.compute import Compute, peak_memory_bytes
from miles_dmd.training.export import exported_buckets, write_student


class RolloutWorker:
    """Awake when it is built. Whatever needs the engine wakes it; batches are the last that a cycle wants of it, so it
    sleeps when they are out: once a cycle each, and no call of their own.

    ``texts`` are what ``prompts`` has encoded; ``servers`` are those started for the engine, if it has any."""

    def __init__(
        self,
        args: Any,
        *,
        compute: Compute,
        prompts: PromptTable,
        texts: Sequence[str] = (),
        servers: Sequence[str] = (),
    ) -> None:
        self.args, self.compute, self.prompts = args, compute, prompts
        build = registry.resolve(registry.load("engines", args.rollout_engine).build)
        self.engine: RolloutEngine = build(args, compute=compute, prompts=prompts, texts=texts, servers=servers)
        self._asleep = False
        self._decode: Any = None

    def generate(self, batches: Sequence[Sequence[RolloutRequest]], num_chunks: int) -> list[list[DenoisingBatch]]:
        """Several batches in one engine call, each cut into ``num_chunks`` equal chunks. Then the engine sleeps."""
        requests = [request for batch in batches for request in batch]
        whole = self._awake().generate(requests)
        if whole.ids != tuple(request.sample_id for request in requests):
            raise EngineError(f"the engine returned samples {whole.ids[:4]}..., asked for {requests[0].sample_id}...")
        result, start = [], 0
        for batch in batches:
            result.append(_chunks(whole.take(range(start, start + len(batch))), num_chunks))
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

    def save_batches(self, batches: Sequence[DenoisingBatch], directory: Path) -> list[FileEntry]:
        """One file each into ``directory``, which exists; paths below its parent. Raises SaveError."""
        paths = [directory / f"batch_{number:03d}.safetensors" for number in range(len(batches))]
        try:
            for path, batch in zip(paths, batches, strict=True):
                write_batch(path, batch)
            return [entry_of(path, directory.parent) for path in paths]
        except OSError as error:
            raise SaveError(f"{directory}: {error.strerror}") from error

    def load_batches(self, paths: Sequence[Path], num_chunks: int) -> list[list[DenoisingBatch]]:
        """As ``generate`` gives them."""
        return [_chunks(read_batch(path), num_chunks) for path in paths]

    def update_weights(self, buckets: Iterable[Mapping[str, Tensor]], version: int) -> None:
        self._awake().update_weights(buckets, version)

    def pictures(self, requests: Sequence[RolloutRequest], limit: float | None) -> tuple[np.ndarray, SampleStatistics]:
        """[B, H, W, 3] uint8: finished samples of all N steps, decoded; and numbers about their latents.

        ``limit`` is where the data's range ends; see ``network.statistics``.
        """
        return self._shown(self._awake().sample(requests), requests, limit)

    def teacher_pictures(
        self, requests: Sequence[RolloutRequest], sampling: Mapping[str, Any]
    ) -> tuple[np.ndarray, SampleStatistics]:
        """The same of the teacher, sampled as ``sampling`` says; where its range ends is where the data's does."""
        self.sleep()  # the teacher takes the engine's place on the device
        family = registry.load("models", self.args.model_family)
        shape = family.code().latent_shape(Path(self.args.teacher_path), *family.resolution(self.args))
        latents = teacher_samples(
            self.args, requests, sampling, shape=shape, compute=self.compute, prompts=self.prompts
        )
        return self._shown(latents, requests, None)

    def _shown(
        self, latents: Tensor, requests: Sequence[RolloutRequest], limit: float | None
    ) -> tuple[np.ndarray, SampleStatistics]:
        if self._decode is None:
            family = registry.load("models", self.args.model_family)
            self._decode = family.code().open_decoder(Path(self.args.hf_checkpoint), self.compute.device)
        told = statistics(latents, [request.prompt_id for request in requests], limit)
        return np.asarray(self._decode(latents)), told

    def export(
        self, directory: Path, buckets: Iterable[Mapping[str, Tensor]], distillation: Distillation
    ) -> ExportReport:
        """Write ``buckets`` as a pipeline that opens in stock diffusers. Raises SaveError."""
        return write_student(
            directory,
            buckets,
            family=registry.load("models", self.args.model_family),
            checkpoint=Path(self.args.hf_checkpoint),
            shift=self.args.shift,
            distillation=distillation,
            dtype=self.args.export_dtype,
        )

    def take_exported(self, directory: Path, version: int) -> None:
        """The engine samples from an exported student, as it was rounded."""
        component = registry.load("models", self.args.model_family).network_component
        self.update_weights(exported_buckets(directory / component), version)

    def peak_memory(self) -> int:
        return peak_memory_bytes(self.compute.device)

    def close(self) -> None:
        self.engine.close()


def _chunks(batch: DenoisingBatch, num_chunks: int) -> list[DenoisingBatch]:
    return [batch.take(rows_of_rank(len(batch), chunk, num_chunks)) for chunk in range(num_chunks)]
