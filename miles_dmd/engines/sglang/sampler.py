"""Rollout engine over SGLang servers: one request per sample, all of one policy version."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from miles_dmd.client import Client
from miles_dmd.engines.sglang import Options, weights
from miles_dmd.engines.sglang.delivery import Delivery
from miles_dmd.engines.sglang.denoiser_fleet import Denoiser, DenoiserFleet, RequireEncoders, require_updates
from miles_dmd.engines.sglang.encoders import Encoders
from miles_dmd.engines.sglang.families import scheduler_directory, served
from miles_dmd.engines.sglang.fleet_engine import ServedEngine, clients_of
from miles_dmd.engines.sglang.folders import sweep, weights_root
from miles_dmd.engines.sglang.probe import MODULE, take_sample
from miles_dmd.engines.sglang.wire import Sample, Sampling
from miles_dmd.errors import EngineError, EngineRefused, EngineUnavailable
from miles_dmd.modalities.diffusion.batch import DenoisingBatch
from miles_dmd.modalities.diffusion.conditions import PromptTable
from miles_dmd.modalities.diffusion.family import diffusion_family
from miles_dmd.modalities.diffusion.options import diffusion_options
from miles_dmd.modalities.diffusion.requests import DenoisingRequest
from miles_dmd.pipelines.weights import stored_tensors
from miles_dmd.sampling.grid import sigma_grid
from miles_dmd.training.compute import DTYPES, Compute
from miles_dmd.training.export import exported_buckets

if TYPE_CHECKING:
    from miles_dmd.config.args import Args
    from miles_dmd.contracts.engine import BuildEngine

log = logging.getLogger(__name__)


class SGLangEngine(ServedEngine[Denoiser]):
    def __init__(
        self,
        args: Args,
        clients: Sequence[Client],
        texts: Sequence[str],
        sampling: Sampling,
        require_encoders: RequireEncoders,
    ) -> None:
        super().__init__(args)
        self.texts, self.sampling = tuple(texts), sampling
        self._component = args.pipeline_directory / MODULE
        fixed, stored = served(args.model_family).fixed_parameters, stored_tensors(self._component) or {}
        self.network = weights.Network(fixed, DTYPES[args.compute_dtype], stored)
        self.forwards = 0
        self.fleet = DenoiserFleet(args, clients, sampling, texts[0], require_encoders)
        self.notes = tuple(map(str, self.fleet.members))
        if self.options.verify_weights != "off":
            self._hold_the_pipelines_weights()

    # -- sampling ---------------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[DenoisingRequest]) -> DenoisingBatch:
        samples = self._samples(requests, [request.stop_step for request in requests])
        sigmas = torch.tensor([self.sampling.sigmas[request.stop_step] for request in requests])
        return DenoisingBatch(
            ids=tuple(request.sample_id for request in requests),
            prompt_ids=tuple(request.prompt_id for request in requests),
            stop_steps=tuple(request.stop_step for request in requests),
            latents=torch.stack([sample.latents for sample in samples]),
            sigma=sigmas,
            clean=torch.stack([sample.clean for sample in samples]),
            policy_version=self.held(),
            run_seed=self.args.seed,
        )

    def sample(self, requests: Sequence[DenoisingRequest]) -> Tensor:
        # the last step goes to sigma = 0, where the sample is its clean prediction
        last = len(self.sampling.sigmas) - 1
        return torch.stack([sample.clean for sample in self._samples(requests, [last] * len(requests))])

    def _samples(self, requests: Sequence[DenoisingRequest], stop_steps: Sequence[int]) -> list[Sample]:
        if bad := [k for k in stop_steps if not 0 <= k < len(self.sampling.sigmas)]:
            raise ValueError(f"stop steps {bad} lie outside [0, {len(self.sampling.sigmas) - 1}]")
        while True:
            # an early stop comes with a receipt; a server without may have been restarted before any of its samples
            unsure = [member for member in self.fleet.admitted if not member.capabilities.stops]
            samples = self._drawn(requests, stop_steps, self.held())
            self.fleet.evict_changed(member for member in unsure if not member.evicted)
            if not any(member.evicted for member in unsure):
                break
        self.forwards += sum(sample.forwards for sample in samples)
        return samples

    def _drawn(self, requests: Sequence[DenoisingRequest], stop_steps: Sequence[int], version: int) -> list[Sample]:
        def take(member: Denoiser, asked: tuple[DenoisingRequest, int]) -> Sample:
            request, stop_step = asked
            text = self.texts[request.prompt_id]
            sample = take_sample(member.client, self.sampling, member.capabilities, text, request.seed, stop_step)
            require_version(member, sample, version)
            return sample

        return self.drawn(list(zip(requests, stop_steps, strict=True)), take)

    # -- weights ----------------------------------------------------------------------------------------------------

    def _push(self, buckets: Iterable[Mapping[str, Tensor]], delivery: Delivery[Denoiser]) -> None:
        on_cpu = all(member.capabilities.device == "cpu" for member in self.fleet.members)
        transport = self.transport(delivery, on_cpu=on_cpu, more={"target_modules": [MODULE]}, part=MODULE)
        weights.Update(delivery, self.network).push(buckets, transport, self.options)

    def _hold_the_pipelines_weights(self) -> None:
        """Version 0 is --hf-checkpoint: servers that another run has used are given it."""
        for member in self.fleet.members:
            try:
                self._require_the_pipelines_weights(member)
            except EngineError:
                log.warning("%s holds other weights than %s; it is given those", member.client.url, self._component)
                self.update_weights(exported_buckets(self._component, ()), 0)
                break
        for member in self.fleet.members:
            member.compared = False  # with weights of the run's own
            if member.checksum and not member.evicted and member.checksum != self._checksum:
                raise EngineRefused(
                    f"{member.client.url} has other parameters than {self._component} has weights for, or holds them "
                    f"in another precision; serve --hf-checkpoint there, with --dit-precision {self.args.compute_dtype}"
                )

    @functools.cached_property
    def _checksum(self) -> str:
        return weights.pipeline_checksum(self._component, self.network.dtype_at(self.fleet.members))

    def _require_the_pipelines_weights(self, member: Denoiser) -> None:
        if member.checksum:
            if member.checksum != self._checksum:
                raise EngineError(f"{member.client.url} holds other weights than {self._component}")
            return
        dtype_of = self.network.dtype_at(self.fleet.members)
        digests = {
            name: weights.digest(value)
            for bucket in exported_buckets(self._component, ())
            for name, value in weights.cast(bucket, dtype_of).items()
        }
        weights.compare(member.client, digests)


def require_version(member: Denoiser, sample: Sample, version: int) -> None:
    """Raises EngineUnavailable for a sample of other weights than the run's: the server was restarted, or shared."""
    if member.capabilities.stops:
        require_updates(member, sample.updates)
    if member.version != version:
        raise EngineUnavailable(f"{member.client.url} holds version {member.version}, and the run's is {version}")


def build(
    args: Args, *, compute: Compute, prompts: PromptTable, texts: Sequence[str], servers: Sequence[str]
) -> SGLangEngine:
    asked: Options = args.engine_options
    family, own, directory = diffusion_family(args), diffusion_options(args), args.pipeline_directory
    sweep(weights_root(args))
    height, width = family.resolution(args)
    sampling = Sampling(
        sigmas=sigma_grid(own.num_inference_steps, own.shift),
        solver=own.solver,
        height=height,
        width=width,
        shape=family.code().latent_shape(directory, height, width),
        text_length=served(args.model_family).text_length(directory, family.text_length(args)),
        grid_cure=f"start that server with --component-paths.scheduler {scheduler_directory(args)}",
    )
    encoders = Encoders(
        directory=directory,
        family=served(args.model_family),
        dtype=args.compute_dtype,
        texts=texts,
        prompts=prompts,
        sampling=sampling,
        by_weights=bool(asked.sglang_url) and asked.verify_weights != "off",
    )
    return SGLangEngine(args, clients_of(asked, servers), texts, sampling, encoders.require_same)


if TYPE_CHECKING:  # mypy compares what the engine type names as text
    _build: BuildEngine = build
