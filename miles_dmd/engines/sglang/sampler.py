"""Rollout engine over SGLang servers: one request per sample, all of one policy version."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from miles_dmd import registry
from miles_dmd.contracts.engine import RolloutRequest
from miles_dmd.contracts.samples import DenoisingBatch
from miles_dmd.engines.sglang import weights
from miles_dmd.engines.sglang.client import Client
from miles_dmd.engines.sglang.encoders import Encoders
from miles_dmd.engines.sglang.families import served
from miles_dmd.engines.sglang.fleet import Fleet, RequireEncoders, changed
from miles_dmd.engines.sglang.folders import OwnFolder, sweep, weights_root
from miles_dmd.engines.sglang.pool import Member
from miles_dmd.engines.sglang.probe import take_sample
from miles_dmd.engines.sglang.schedule import scheduler_directory
from miles_dmd.engines.sglang.update import Network, Update, Verify
from miles_dmd.engines.sglang.wire import Sample, Sampling
from miles_dmd.errors import EngineError, EngineRefused, EngineUnavailable
from miles_dmd.network.conditions import PromptTable
from miles_dmd.sampling.grid import sigma_grid
from miles_dmd.training.compute import DTYPES, Compute

log = logging.getLogger(__name__)


class SGLangEngine:
    def __init__(
        self,
        args: Any,
        clients: Sequence[Client],
        texts: Sequence[str],
        sampling: Sampling,
        require_encoders: RequireEncoders,
    ) -> None:
        self.args, self.options, self.texts, self.sampling = args, args.engine_options, tuple(texts), sampling
        family = served(args.model_family)
        self.network = Network(
            family.fixed_parameters, DTYPES[args.compute_dtype], weights.stored_shapes(self._component)
        )
        self.forwards = 0
        self._folder: OwnFolder | None = None
        self.fleet = Fleet(
            clients,
            sampling,
            family=family,
            text=texts[0],
            options=self.options,
            dtype=args.compute_dtype,
            require_encoders=require_encoders,
        )
        self.pool = self.fleet.pool
        self.version: int | None = 0
        if self.options.verify_weights != "off":
            self._hold_the_checkpoint()

    @property
    def notes(self) -> tuple[str, ...]:
        return self.fleet.notes

    @property
    def _component(self) -> Path:
        return Path(self.args.hf_checkpoint) / weights.MODULE

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
            samples = self._drawn(requests, stop_steps, self._held())
            # an early stop comes with a receipt; of others, some may be of a server that was restarted meanwhile
            if not self.fleet.evict_changed(m for m in self.pool.admitted if not m.capabilities.stops):
                break
        self.forwards += sum(sample.forwards for sample in samples)
        return samples

    def _drawn(self, requests: Sequence[RolloutRequest], stop_steps: Sequence[int], version: int) -> list[Sample]:
        threads = ThreadPoolExecutor(max(len(self.pool.admitted), 1) * self.options.sglang_concurrency)
        try:
            futures: list[Future[Sample]] = [
                threads.submit(self._one, request, stop_step, version)
                for request, stop_step in zip(requests, stop_steps, strict=True)
            ]
            return [future.result() for future in futures]
        finally:
            threads.shutdown(wait=True, cancel_futures=True)

    def _one(self, request: RolloutRequest, stop_step: int, version: int) -> Sample:
        """From some server; one that does not answer is taken out, and the next one is asked."""
        while True:
            with self.pool.taken() as member:
                try:
                    sample = take_sample(
                        member.client, self.sampling, member.capabilities,
                        self.texts[request.prompt_id], request.seed, stop_step,
                    )  # fmt: skip
                    require_version(member, sample, version)
                except EngineUnavailable as error:
                    self.fleet.take_out(member, error)
                else:
                    return sample

    def _held(self) -> int:
        """The version that all admitted servers hold."""
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
        """All admitted servers or none; servers that are back are given the weights too, and taken in again."""
        self._require_awake()
        returning = self.fleet.returning(self.pool.out)
        self.fleet.take_out_the_dead()
        # one that was restarted since its last sample is compared as at the start, like any that is back
        returning += self.fleet.returning(self.fleet.evict_changed(self.pool.admitted))
        if not returning:
            self.pool.require_one()
        update = Update(version, self.network, must=self.pool.admitted, may=returning)
        # until all is done, nobody knows what the servers hold
        self.version = None
        verify = Verify(self.options.verify_weights, self.options.verify_weights_interval)
        update.push(buckets, self._transport(update), verify)
        self.fleet.readmit(update.returned)
        self.pool.require_one()
        self.version = version

    def _transport(self, update: Update) -> weights.Transport:
        how = self.options.sglang_weights
        if how == "auto":
            how = "tensor" if all(member.capabilities.device == "cpu" for member in self.pool.members) else "disk"
        if how == "tensor":
            return weights.InRequests(update.each)
        self._folder = self._folder or OwnFolder(weights_root(self.args))
        return weights.ThroughFolder(update.each, self._folder.fresh(f"version{update.version}"))

    def _hold_the_checkpoint(self) -> None:
        """Version 0 is --hf-checkpoint: a server that another run has used is given it."""
        for member in self.pool.members:
            try:
                self._require_checkpoint(member)
            except EngineError:
                log.warning("%s holds other weights than %s; it is given those", member.client.url, self._component)
                self.update_weights(weights.checkpoint_buckets(self._component), 0)
                break
        for member in self.pool.members:
            member.compared = False  # with weights of the run's own
            if member.checksum and not member.wrong and member.checksum != self._checkpoint_checksum():
                raise EngineRefused(
                    f"{member.client.url} has other parameters than {self._component} has weights for, or holds them "
                    f"in another precision; serve --hf-checkpoint there, with --dit-precision {self.args.compute_dtype}"
                )

    @functools.cache  # noqa: B019 - an engine lives as long as its run
    def _checkpoint_checksum(self) -> str:
        return weights.checkpoint_checksum(self._component, self.network.dtype_at(self.pool.members))

    def _require_checkpoint(self, member: Member) -> None:
        if member.checksum:
            if member.checksum != self._checkpoint_checksum():
                raise EngineError(f"{member.client.url} holds other weights than {self._component}")
            return
        dtype_of = self.network.dtype_at(self.pool.members)
        digests = {
            name: weights.digest(value)
            for bucket in weights.checkpoint_buckets(self._component)
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
    if member.capabilities.stops and sample.updates != member.capabilities.updates:
        raise changed(member, sample.updates)
    if member.version != version:
        raise EngineUnavailable(f"{member.client.url} holds version {member.version}, and the run's is {version}")


def build(
    args: Any, *, compute: Compute, prompts: PromptTable, texts: Sequence[str], servers: Sequence[str]
) -> SGLangEngine:
    options = args.engine_options
    family, checkpoint = registry.load("models", args.model_family), Path(args.hf_checkpoint)
    sweep(weights_root(args))
    height, width = family.resolution(args)
    sampling = Sampling(
        sigmas=sigma_grid(args.num_inference_steps, args.shift),
        solver=args.solver,
        height=height,
        width=width,
        shape=family.code().latent_shape(checkpoint, height, width),
        text_length=served(args.model_family).text_length(checkpoint, family.text_length(args)),
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
        checkpoint=checkpoint,
        family=served(args.model_family),
        dtype=args.compute_dtype,
        texts=texts,
        prompts=prompts,
        sampling=sampling,
        by_weights=bool(options.sglang_url) and options.verify_weights != "off",
    )
    return SGLangEngine(args, clients, texts, sampling, encoders.require_same)
