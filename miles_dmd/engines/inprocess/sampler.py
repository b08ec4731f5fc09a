"""Few-step sampler of the student, with stop step, on a network of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from miles_dmd.engines.inprocess.resident import ResidentEngine
from miles_dmd.modalities.diffusion.batch import DenoisingBatch
from miles_dmd.modalities.diffusion.conditions import PromptTable
from miles_dmd.modalities.diffusion.denoiser import Denoiser
from miles_dmd.modalities.diffusion.family import diffusion_family
from miles_dmd.modalities.diffusion.few_step import Stopped, sample_until
from miles_dmd.modalities.diffusion.options import diffusion_options
from miles_dmd.modalities.diffusion.requests import DenoisingRequest
from miles_dmd.network.pretrained import load_network
from miles_dmd.sampling.grid import sigma_grid
from miles_dmd.sampling.partition import micro_batches
from miles_dmd.training.compute import Compute

if TYPE_CHECKING:
    from miles_dmd.config.args import Args
    from miles_dmd.contracts.engine import BuildEngine


class InProcessEngine(ResidentEngine):
    """Samples few-step rollouts."""

    def __init__(
        self,
        model: Denoiser,
        prompts: PromptTable,
        *,
        sigmas: Sequence[float],
        solver: Literal["renoise", "euler"],
        shape: tuple[int, ...],
        micro_batch_size: int,
        run_seed: int,
        device: torch.device,
    ) -> None:
        super().__init__(model.network, device)
        self.model, self.prompts, self.sigmas, self.solver = model, prompts, tuple(sigmas), solver
        self.shape, self.micro_batch_size, self.run_seed = shape, micro_batch_size, run_seed

    def generate(self, requests: Sequence[DenoisingRequest]) -> DenoisingBatch:
        stopped = self._run(requests, [request.stop_step for request in requests])
        return DenoisingBatch(
            ids=tuple(request.sample_id for request in requests),
            prompt_ids=tuple(request.prompt_id for request in requests),
            stop_steps=tuple(request.stop_step for request in requests),
            latents=stopped.latents.cpu(),
            sigma=stopped.sigma.cpu(),
            clean=stopped.clean.cpu(),
            policy_version=self.version,
            run_seed=self.run_seed,
        )

    def sample(self, requests: Sequence[DenoisingRequest]) -> Tensor:
        # the last step goes to sigma = 0, where the sample is its clean prediction
        return self._run(requests, [len(self.sigmas) - 1] * len(requests)).clean.cpu()

    def _run(self, requests: Sequence[DenoisingRequest], stop_steps: Sequence[int]) -> Stopped:
        self.require_awake()
        parts = [
            sample_until(
                self.model,
                self.prompts.lookup([requests[row].prompt_id for row in rows]),
                seeds=[requests[row].seed for row in rows],
                stop_steps=[stop_steps[row] for row in rows],
                sigmas=self.sigmas,
                solver=self.solver,
                shape=self.shape,
                device=self.device,
            )
            for rows in micro_batches(len(requests), self.micro_batch_size)
        ]
        return Stopped(*(torch.cat(column) for column in zip(*parts, strict=True)))


def build(
    args: Args, *, compute: Compute, prompts: PromptTable, texts: Sequence[str] = (), servers: Sequence[str] = ()
) -> InProcessEngine:
    family, own, directory = diffusion_family(args), diffusion_options(args), args.pipeline_directory
    network = load_network(family, directory, dtype=compute.dtype).requires_grad_(False).to(compute.device)
    return InProcessEngine(
        Denoiser(family.code(), network, compute.dtype),
        prompts,
        sigmas=sigma_grid(own.num_inference_steps, own.shift),
        solver=own.solver,
        shape=family.code().latent_shape(directory, *family.resolution(args)),
        micro_batch_size=args.rollout_micro_batch_size,
        run_seed=args.seed,
        device=compute.device,
    )


if TYPE_CHECKING:  # mypy compares what the engine type names as text
    _build: BuildEngine = build
