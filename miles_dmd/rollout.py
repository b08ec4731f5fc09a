"""The rollout worker: an engine, and everything that turns its samples into batches and pictures. Knows no Ray."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from miles_dmd import registry
from miles_dmd.contracts.distillation import Distillation
from miles_dmd.contracts.engine import RolloutEngine, RolloutRequest
from miles_dmd.contracts.samples import DenoisingBatch
from miles_dmd.errors import EngineError
from miles_dmd.network.conditions import PromptTable
from miles_dmd.plan.partition import rows_of_rank
from miles_dmd.training.compute import Compute, peak_memory_bytes
from miles_dmd.training.export import write_student


class RolloutWorker:
    def __init__(self, args: Any, *, compute: Compute, prompts: PromptTable) -> None:
        self.args, self.compute = args, compute
        engine_type = registry.load("engines", args.rollout_engine)
        self.engine: RolloutEngine = registry.resolve(engine_type.build)(args, compute, prompts)
        self._decode: Any = None

    def generate(self, batches: Sequence[Sequence[RolloutRequest]], num_chunks: int) -> list[list[DenoisingBatch]]:
        """Several batches in one engine call, each cut into ``num_chunks`` equal chunks."""
        requests = [request for batch in batches for request in batch]
        whole = self.engine.generate(requests)
        if whole.ids != tuple(request.sample_id for request in requests):
            raise EngineError(f"the engine returned samples {whole.ids[:4]}..., asked for {requests[0].sample_id}...")
        result, start = [], 0
        for batch in batches:
            rows = [rows_of_rank(len(batch), chunk, num_chunks) for chunk in range(num_chunks)]
            result.append([whole.take(range(start + part.start, start + part.stop)) for part in rows])
            start += len(batch)
        return result

    def update_weights(self, buckets: Iterable[Mapping[str, Tensor]], version: int) -> None:
        self.engine.update_weights(buckets, version)

    def pictures(self, requests: Sequence[RolloutRequest]) -> np.ndarray:
        """[B, H, W, 3] uint8: finished samples of all N steps, decoded."""
        if self._decode is None:
            family = registry.load("models", self.args.model_family)
            self._decode = family.code().open_decoder(Path(self.args.hf_checkpoint))
        return np.asarray(self._decode(self.engine.sample(requests)))

    def export(self, directory: Path, buckets: Iterable[Mapping[str, Tensor]], distillation: Distillation) -> None:
        """Write ``buckets`` as a pipeline that opens in stock diffusers."""
        write_student(
            directory,
            buckets,
            family=registry.load("models", self.args.model_family),
            checkpoint=Path(self.args.hf_checkpoint),
            shift=self.args.shift,
            distillation=distillation,
        )

    def peak_memory(self) -> int:
        return peak_memory_bytes(self.compute.device)

    def close(self) -> None:
        self.engine.close()
