"""The rollout engine over SGLang's servers: one request a sample, all of them of one policy version, or an error."""

from __future__ import annotations

import logging
import secrets
import shutil
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
from miles_dmd.engines.sglang.families import Served, served
from miles_dmd.engines.sglang.pool import Member, Pool
from miles_dmd.engines.sglang.probe import other_law, probe, report, take_sample
from miles_dmd.engines.sglang.schedule import scheduler_directory
from miles_dmd.engines.sglang.wire import Sample, Sampling
from miles_dmd.errors import ConfigError, EngineError, EngineUnavailable
from miles_dmd.network.conditions import PromptTable, encoder_fingerprint
from miles_dmd.plan.grid import sigma_grid
from miles_dmd.training.compute import DTYPES, Compute

log = logging.getLogger(__name__)


class SGLangEngine:
    def __init__(self, args: Any, clients: Sequence[Client], texts: Sequence[str], sampling: Sampling) -> None:
        self.args, self.options, self.texts, self.sampling = args, args.engine_options, tuple(texts), sampling
        self.family: Served = served(args.model_family)
        self.asleep = False
        self._folder = Path(args.cache_dir).expanduser() / "sglang" / "weights" / secrets.token_hex(8)
        self.forwards = 0
        self._verified = False
        self.pool = Pool([Member(client, probe(client, self.family.pipeline)) for client in clients])
        self.version: int | None = 0
        self.notes = tuple(self._introduce(member) for member in self.pool.members)
        if self.options.verify_weights != "off":
            self._hold_the_checkpoint()
        for member in self.pool.members:
            member.version = 0

    def _introduce(self, member: Member) -> str:
        note = f"{member.client.url}: {member.capabilities}"
        if difference := other_law(
            member.client, self.sampling, member.capabilities, self.texts[0], self.args.compute_dtype
        ):
            note += f"; samples differ from the in-process engine's: {difference}"
        log.info(note)
        return note

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
        version = self._held()
        if bad := [k for k in stop_steps if not 0 <= k < len(self.sampling.sigmas)]:
            raise ValueError(f"stop steps {bad} lie outside [0, {len(self.sampling.sigmas) - 1}]")
        threads = ThreadPoolExecutor(max(len(self.pool.admitted), 1) * self.options.sglang_concurrency)
        try:
            futures: list[Future[Sample]] = [
                threads.submit(self._one, request, stop_step, version)
                for request, stop_step in zip(requests, stop_steps, strict=True)
            ]
            samples = [future.result() for future in futures]
        finally:
            threads.shutdown(wait=True, cancel_futures=True)
        self.forwards += sum(sample.forwards for sample in samples)
        return samples

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
                    member.wrong = str(error)
                    log.warning("%s is taken out: %s", member.client.url, error)
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
        if self.asleep:
            raise EngineError("the rollout engine is asleep; wake it before it samples or takes weights")

    # -- weights ----------------------------------------------------------------------------------------------------

    def update_weights(self, buckets: Iterable[Mapping[str, Tensor]], version: int) -> None:
        """All admitted servers or none; servers that are back are given the weights too, and taken in again."""
        self._require_awake()
        returning = [member for member in self.pool.out if self._is_back(member)]
        if not returning:
            self._take_out_the_dead()
        members = (*self.pool.admitted, *returning)
        # until all is done, nobody knows what the servers hold
        self.version = None
        self._push(buckets, version, members)
        for member in members:
            member.version = version
        self.version = version
        for member in returning:
            self._readmit(member)

    def _push(self, buckets: Iterable[Mapping[str, Tensor]], version: int, members: Sequence[Member]) -> None:
        clients = [member.client for member in members]
        transport = self._transport(clients, version)
        verify = self.options.verify_weights == "every" or (
            self.options.verify_weights == "first" and not self._verified
        )
        digests: dict[str, str] = {}
        names: set[str] = set()
        for bucket in buckets:
            self._refuse_unknown(bucket, version, members)
            sent = weights.cast(bucket, self._dtype_of)
            transport.send(sent)
            names |= sent.keys()
            digests |= {name: weights.digest(value) for name, value in sent.items()} if verify else {}
        self._refuse_missing(names, version, members)
        transport.finish()
        if verify:
            weights.on_all(clients, lambda client: weights.compare(client, digests))
            self._verified = True
        for member in members:
            member.capabilities = report(member.client, member.capabilities.version)

    def _transport(self, clients: Sequence[Client], version: int) -> weights.Transport:
        how = self.options.sglang_weights
        if how == "auto":
            how = "tensor" if all(member.capabilities.device == "cpu" for member in self.pool.members) else "disk"
        if how == "tensor":
            return weights.InRequests(clients)
        # two folders in turn: a server may still want to go back to the one before
        return weights.ThroughFolder(clients, self._folder / str(version % 2))

    def _dtype_of(self, name: str) -> torch.dtype:
        for member in self.pool.members:
            if member.capabilities.parameters and name in member.capabilities.parameters:
                dtype: torch.dtype = getattr(torch, member.capabilities.parameters[name][1].removeprefix("torch."))
                return dtype
        return torch.float32 if name in self.family.fixed_parameters else DTYPES[self.args.compute_dtype]

    def _refuse_unknown(self, bucket: Mapping[str, Tensor], version: int, members: Sequence[Member]) -> None:
        """SGLang would skip such a name, and say that all is well."""
        for member in members:
            known = member.capabilities.parameters
            if known is None:
                continue
            if unknown := sorted(bucket.keys() - known.keys()):
                raise EngineError(
                    f"weights of version {version} name {unknown[:4]}, which the network does not have "
                    f"({member.client.url})"
                )
            for name, value in bucket.items():
                if tuple(value.shape) != known[name][0]:
                    raise EngineError(
                        f"weights of version {version}: {name} has shape {tuple(value.shape)}, and {known[name][0]} at "
                        f"{member.client.url}"
                    )

    def _refuse_missing(self, names: set[str], version: int, members: Sequence[Member]) -> None:
        for member in members:
            known = member.capabilities.parameters or {}
            if missing := sorted(known.keys() - names - self.family.fixed_parameters):
                raise EngineError(
                    f"weights of version {version} lack {missing[:4]} ({len(missing)} parameters in all) that "
                    f"{member.client.url} has"
                )

    def _hold_the_checkpoint(self) -> None:
        """Version 0 is --hf-checkpoint: a server that another run has used is given it."""
        component = Path(self.args.hf_checkpoint) / weights.MODULE
        digests = {
            name: weights.digest(value)
            for bucket in weights.checkpoint_buckets(component)
            for name, value in weights.cast(bucket, self._dtype_of).items()
        }
        for member in self.pool.members:
            try:
                weights.compare(member.client, digests)
            except EngineError:
                log.warning("%s holds other weights than %s; it is given those", member.client.url, component)
                self.update_weights(weights.checkpoint_buckets(component), 0)
                break
        self._verified = False

    # -- servers that come back -------------------------------------------------------------------------------------

    def _is_back(self, member: Member) -> bool:
        try:
            member.capabilities = probe(member.client, self.family.pipeline, deadline=0.0)
        except EngineError as error:
            member.wrong = str(error)
            return False
        return True

    def _readmit(self, member: Member) -> None:
        """After a real sample; that it is alive says little."""
        try:
            take_sample(member.client, self.sampling, member.capabilities, self.texts[0], 0, 0, deadline=0.0)
        except EngineError as error:
            member.wrong = str(error)
        else:
            member.wrong = ""
            log.info("%s is taken in again", member.client.url)

    # -- memory, health, end ----------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Returns when every server has given its memory back: a trainer may use the device then."""
        self._switch("/release_memory_occupation", asleep=True)

    def wake(self) -> None:
        self._switch("/resume_memory_occupation", asleep=False)

    def _switch(self, path: str, *, asleep: bool) -> None:
        self._take_out_the_dead()
        for member in self.pool.admitted:
            weights.succeed(member.client, path, {})
            if member.capabilities.plugin:
                found = report(member.client, member.capabilities.version)
                if found.asleep != asleep:
                    state = "asleep" if found.asleep else "awake"
                    raise EngineError(f"{member.client.url}{path} says success, and the server is {state}")
        self.asleep = asleep

    def _take_out_the_dead(self) -> None:
        """One whose address nobody answers at holds no device memory, and no weights. Raises where none is left."""
        for member in self.pool.admitted:
            member.wrong = _wrong_now(member)
        self.pool.require_one()

    def health(self) -> Mapping[str, str]:
        """server -> empty, or what is wrong with it."""
        return {member.client.url: member.wrong or _wrong_now(member) for member in self.pool.members}

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        for member in self.pool.members:
            member.client.close()


def require_version(member: Member, sample: Sample, version: int) -> None:
    """Raises EngineUnavailable for a sample of other weights than the run's: the server was restarted, or shared."""
    if member.version != version or sample.updates != member.capabilities.updates:
        raise EngineUnavailable(
            f"{member.client.url} holds version {member.version} of {version}, and samples after {sample.updates} "
            f"updates of {member.capabilities.updates} that are known: it was restarted, or somebody else updates it"
        )


def _wrong_now(member: Member) -> str:
    try:
        member.client.get("/health", deadline=0.0)
    except EngineError as error:
        return str(error)
    return ""


def build(
    args: Any, *, compute: Compute, prompts: PromptTable, texts: Sequence[str], servers: Sequence[str]
) -> SGLangEngine:
    options = args.engine_options
    family, checkpoint = registry.load("models", args.model_family), Path(args.hf_checkpoint)
    _require_same_encoders(args, family)
    height, width = family.default_pixels(checkpoint)
    height, width = args.height or height, args.width or width
    sampling = Sampling(
        sigmas=sigma_grid(args.num_inference_steps, args.shift),
        solver=args.solver,
        height=height,
        width=width,
        shape=family.code().latent_shape(checkpoint, height, width),
        text_length=served(args.model_family).text_length(checkpoint, args.max_sequence_length),
        grid_cure=f"start that server with --component-paths.scheduler {scheduler_directory(args)}",
    )
    clients = [
        Client(
            url,
            timeout=options.sglang_timeout,
            deadline=options.sglang_deadline,
            connections=options.sglang_concurrency,
        )
        for url in options.sglang_url or servers
    ]
    return SGLangEngine(args, clients, texts, sampling)


def _require_same_encoders(args: Any, family: Any) -> None:
    """Servers encode prompts with the student's checkpoint, trainers look them up as the teacher's has encoded them."""
    paths = {Path(path).resolve() for path in (args.hf_checkpoint, args.teacher_path)}
    if len({encoder_fingerprint(family, path) for path in paths}) != 1:
        raise ConfigError(
            f"--teacher-checkpoint {args.teacher_path} has other text encoders than --hf-checkpoint "
            f"{args.hf_checkpoint}, and a SGLang server uses the latter's; pass --rollout-engine inprocess"
        )
