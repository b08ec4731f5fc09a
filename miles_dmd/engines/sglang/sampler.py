"""Rollout engine over SGLang servers: one request per sample, all of one policy version."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from miles_dmd import registry
from miles_dmd.client import Client
from miles_dmd.contracts.engine import RolloutRequest
from miles_dmd.contracts.family import ModelFamily
from miles_dmd.contracts.samples import DenoisingBatch
from miles_dmd.engines.sglang import Options, weights
from miles_dmd.engines.sglang.encoders import Encoders
from miles_dmd.engines.sglang.families import scheduler_directory, served
from miles_dmd.engines.sglang.fleet import Fleet, Member, RequireEncoders, require_updates
from miles_dmd.engines.sglang.folders import OwnFolder, sweep, weights_root
from miles_dmd.engines.sglang.probe import MODULE, take_sample
from miles_dmd.engines.sglang.wire import Sample, Sampling
from miles_dmd.errors import EngineError, EngineRefused, EngineUnavailable
from miles_dmd.network.conditions import PromptTable
from miles_dmd.pipelines.weights import stored_tensors
from miles_dmd.sampling.grid import sigma_grid
from miles_dmd.training.compute import DTYPES, Compute
from miles_dmd.training.export import exported_buckets

if TYPE_CHECKING:
    from miles_dmd.config.args import Args
    from miles_dmd.contracts.engine import BuildEngine

log = logging.getLogger(__name__)


class SGLangEngine:
    def __init__(
        self,
        args: Args,
        clients: Sequence[Client],
        texts: Sequence[str],
        sampling: Sampling,
        require_encoders: RequireEncoders,
    ) -> None:
        self.args, self.texts, self.sampling = args, tuple(texts), sampling
        self.options: Options = args.engine_options
        self._component = args.pipeline_directory / MODULE
        fixed, stored = served(args.model_family).fixed_parameters, stored_tensors(self._component) or {}
        self.network = weights.Network(fixed, DTYPES[args.compute_dtype], stored)
        self.forwards = 0
        self._folder: OwnFolder | None = None
        self.fleet = Fleet(args, clients, sampling, texts[0], require_encoders)
        self.notes = tuple(map(str, self.fleet.members))
        self.version: int | None = 0
        """Version of the weights that all admitted servers hold; None where an update has failed."""
        if self.options.verify_weights != "off":
            self._hold_the_pipelines_weights()

    # -- sampling ---------------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[RolloutRequest]) -> DenoisingBatch:
        samples = self._samples(requests, [request.stop_step for request in requests])
        sigmas = torch.tensor([self.sampling.sigmas[request.stop_step] for request in requests])
        return DenoisingBatch(
            ids=tuple(request.sample_id for request in requests),
            prompt_ids=tuple(request.prompt_id for request in requests),
            stop_steps=tuple(request.stop_step for request in requests),
            latents=torch.stack([sample.latents for sample in samples]),
            sigma=sigmas,
            clean=torch.stack([sample.clean for sample in samples]),
            policy_version=self._held(),
            run_seed=self.args.seed,
        )

    def sample(self, requests: Sequence[RolloutRequest]) -> Tensor:
        # the last step goes to sigma = 0, where the sample is its clean prediction
        last = len(self.sampling.sigmas) - 1
        return torch.stack([sample.clean for sample in self._samples(requests, [last] * len(requests))])

    def _samples(self, requests: Sequence[RolloutRequest], stop_steps: Sequence[int]) -> list[Sample]:
        if bad := [k for k in stop_steps if not 0 <= k < len(self.sampling.sigmas)]:
            raise ValueError(f"stop steps {bad} lie outside [0, {len(self.sampling.sigmas) - 1}]")
        while True:
            # an early stop comes with a receipt; a server without may have been restarted before any of its samples
            unsure = [member for member in self.fleet.admitted if not member.capabilities.stops]
            samples = self._drawn(requests, stop_steps, self._held())
            self.fleet.evict_changed(member for member in unsure if not member.evicted)
            if not any(member.evicted for member in unsure):
                break
        self.forwards += sum(sample.forwards for sample in samples)
        return samples

    def _drawn(self, requests: Sequence[RolloutRequest], stop_steps: Sequence[int], version: int) -> list[Sample]:
        threads = ThreadPoolExecutor(max(len(self.fleet.admitted), 1) * self.options.sglang_concurrency)
        try:
            futures: list[Future[Sample]] = [
                threads.submit(self._one, request, stop_step, version)
                for request, stop_step in zip(requests, stop_steps, strict=True)
            ]
            return [future.result() for future in futures]
        finally:
            threads.shutdown(wait=True, cancel_futures=True)

    def _one(self, request: RolloutRequest, stop_step: int, version: int) -> Sample:
        """From some server; one that does not answer is evicted, and the next one is asked."""
        while True:
            with self.fleet.taken() as member:
                try:
                    sample = take_sample(
                        member.client, self.sampling, member.capabilities,
                        self.texts[request.prompt_id], request.seed, stop_step,
                    )  # fmt: skip
                    require_version(member, sample, version)
                except EngineUnavailable as error:
                    self.fleet.evict(member, error)
                else:
                    return sample

    def _held(self) -> int:
        """Version of the weights; raises EngineError while the engine sleeps or none are whole."""
        self._require_awake()
        if self.version is None:
            raise EngineError(
                "the last weight update failed, so the servers hold parts of it; start again from a checkpoint"
            )
        return self.version

    def _require_awake(self) -> None:
        if self.fleet.asleep:
            raise EngineError("the rollout engine is asleep; wake it before it samples or takes weights")

    # -- weights ----------------------------------------------------------------------------------------------------

    def update_weights(self, buckets: Iterable[Mapping[str, Tensor]], version: int) -> None:
        """All admitted servers or none; servers that are back are given the weights too, and readmitted."""
        self._require_awake()
        returning = self.fleet.returning(self.fleet.evicted)
        self.fleet.evict_unreachable()
        # one that was restarted since its last sample is compared as at the start, like any that is back
        returning += self.fleet.returning(self.fleet.evict_changed(self.fleet.admitted))
        if not returning:
            self.fleet.require_one()
        update = weights.Update(version, self.network, must=self.fleet.admitted, may=returning)
        # until all is done, nobody knows what the servers hold
        self.version = None
        update.push(buckets, self._transport(update), self.options)
        self.fleet.readmit(update.returned)
        self.fleet.require_one()
        self.version = version

    def _transport(self, update: weights.Update) -> weights.Transport:
        how = self.options.sglang_weights
        if how == "auto":
            how = "tensor" if all(member.capabilities.device == "cpu" for member in self.fleet.members) else "disk"
        if how == "tensor":
            return weights.InRequests(update.each)
        self._folder = self._folder or OwnFolder(weights_root(self.args))
        return weights.ThroughFolder(update.each, self._folder.fresh(f"version{update.version}"))

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

    def _require_the_pipelines_weights(self, member: Member) -> None:
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

    # -- memory, health, end ----------------------------------------------------------------------------------------

    def sleep(self) -> None:
        self.fleet.sleep()

    def wake(self) -> None:
        self.fleet.wake()

    def health(self) -> Mapping[str, str]:
        return self.fleet.health()

    def close(self) -> None:
        if self._folder is not None:
            self._folder.close()
            self._folder = None
        self.fleet.close()


def require_version(member: Member, sample: Sample, version: int) -> None:
    """Raises EngineUnavailable for a sample of other weights than the run's: the server was restarted, or shared."""
    if member.capabilities.stops:
        require_updates(member, sample.updates)
    if member.version != version:
        raise EngineUnavailable(f"{member.client.url} holds version {member.version}, and the run's is {version}")


def build(
    args: Args, *, compute: Compute, prompts: PromptTable, texts: Sequence[str], servers: Sequence[str]
) -> SGLangEngine:
    options: Options = args.engine_options
    family: ModelFamily = registry.load("models", args.model_family)
    directory = args.pipeline_directory
    sweep(weights_root(args))
    height, width = family.resolution(args)
    sampling = Sampling(
        sigmas=sigma_grid(args.num_inference_steps, args.shift),
        solver=args.solver,
        height=height,
        width=width,
        shape=family.code().latent_shape(directory, height, width),
        text_length=served(args.model_family).text_length(directory, family.text_length(args)),
        grid_cure=f"start that server with --component-paths.scheduler {scheduler_directory(args)}",
    )
    clients = [
        Client(
            url,
            timeout=options.sglang_timeout,
            deadline=options.sglang_deadline,
            connections=options.sglang_concurrency,
            managed=not options.sglang_url,
        )
        for url in options.sglang_url or servers
    ]
    encoders = Encoders(
        directory=directory,
        family=served(args.model_family),
        dtype=args.compute_dtype,
        texts=texts,
        prompts=prompts,
        sampling=sampling,
        by_weights=bool(options.sglang_url) and options.verify_weights != "off",
    )
    return SGLangEngine(args, clients, texts, sampling, encoders.require_same)


if TYPE_CHECKING:  # mypy compares what the engine type names as text
    _build: BuildEngine = build
