"""Studio of diffusion models: decodes samples of student and teacher, exports the student as a pipeline."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch import Tensor

from miles_dmd.contracts.reports import ExportReport
from miles_dmd.modalities.diffusion.conditions import PromptTable
from miles_dmd.modalities.diffusion.distillation import Distillation
from miles_dmd.modalities.diffusion.export import write_pipeline
from miles_dmd.modalities.diffusion.family import diffusion_family
from miles_dmd.modalities.diffusion.options import diffusion_options
from miles_dmd.modalities.diffusion.requests import DenoisingRequest
from miles_dmd.modalities.diffusion.statistics import SampleStatistics, statistics
from miles_dmd.modalities.diffusion.teacher import teacher_samples
from miles_dmd.training.compute import Compute
from miles_dmd.training.export import exported_buckets

if TYPE_CHECKING:
    from miles_dmd.config.args import Args

Pictures = tuple[Any, SampleStatistics]
"""[B, H, W, 3] uint8 images, and numbers about their latents."""


class FinishingEngine(Protocol):
    """A rollout engine that also finishes samples."""

    def sample(self, requests: Sequence[DenoisingRequest]) -> Tensor:
        """[B, C, H, W] fp32: the finished latents of all N steps; stop steps are ignored."""
        ...


class DiffusionStudio:
    def __init__(self, args: Args, compute: Compute, prompts: PromptTable) -> None:
        self.args, self.compute, self.prompts = args, compute, prompts
        self._family = diffusion_family(args)

    def show(self, engine: FinishingEngine, requests: Sequence[DenoisingRequest], reference: float | None) -> Pictures:
        """Finished samples of all N steps, decoded; ``reference`` is where the data's range ends, see
        ``statistics``."""
        return self._decoded(engine.sample(requests), requests, reference)

    def show_teacher(self, requests: Sequence[DenoisingRequest], sampling: Mapping[str, Any]) -> Pictures:
        """The same of the teacher, sampled as ``sampling`` says; where its range ends is where the data's does."""
        shape = self._family.code().latent_shape(self.args.teacher_directory, *self._family.resolution(self.args))
        latents = teacher_samples(
            self.args, requests, sampling, shape=shape, compute=self.compute, prompts=self.prompts
        )
        return self._decoded(latents, requests, None)

    def export(self, buckets: Iterable[Mapping[str, Tensor]], directory: Path, record: Distillation) -> ExportReport:
        """Write the student as a pipeline that opens in stock diffusers. Raises SaveError."""
        return write_pipeline(
            directory,
            buckets,
            family=self._family,
            start=self.args.pipeline_directory,
            shift=diffusion_options(self.args).shift,
            distillation=record,
            dtype=self.args.export_dtype,
        )

    def exported(self, directory: Path) -> Iterator[Mapping[str, Tensor]]:
        """Parameters of an exported student, bucket by bucket."""
        return exported_buckets(directory / self._family.network_component, self._family.saved_buffers)

    @functools.cached_property
    def _decode(self) -> Callable[[Tensor], Tensor]:
        return self._family.code().open_decoder(self.args.pipeline_directory, self.compute.device)

    def _decoded(self, latents: Tensor, requests: Sequence[DenoisingRequest], limit: float | None) -> Pictures:
        measured = statistics(latents, [request.prompt_id for request in requests], limit)
        return np.asarray(self._decode(latents)), measured
