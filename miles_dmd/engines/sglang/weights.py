"""Weight updates of SGLang servers: transport in requests or through a folder, and verification."""

from __future__ import annotations

import base64
import functools
import hashlib
import heapq
import logging
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor

from miles_dmd.client import Client
from miles_dmd.engines.sglang.fleet import CHANGED, Member, outcomes
from miles_dmd.engines.sglang.probe import MODULE, checksum, report
from miles_dmd.errors import EngineError, EngineRefused
from miles_dmd.pipelines.weights import weight_files
from miles_dmd.training.export import LazyTensors

if TYPE_CHECKING:
    from miles_dmd.engines.sglang import Options

log = logging.getLogger(__name__)

SAMPLED = 16
"""Tensors of an update that are compared where not all of them are."""

# -- transport --------------------------------------------------------------------------------------------------------


Each = Callable[[Callable[[Client], None]], None]
"""Makes a call for every server that takes the update, at once."""


class InRequests:
    """Each bucket is a request's body: what a server on a CPU takes, whose unpickler admits tensors and little else."""

    path = "/update_weights_from_tensor"

    def __init__(self, each: Each) -> None:
        self.each = each
        self.requests = 0
        """Requests that each server has had to take so far."""

    def send(self, bucket: Mapping[str, Tensor]) -> None:
        payload = base64.b64encode(pickle.dumps(list(bucket.items()))).decode()
        body = {"serialized_named_tensors": [payload], "target_modules": [MODULE]}
        self.each(lambda client: client.succeed(self.path, body))
        self.requests += 1

    def finish(self) -> None: ...


class ThroughFolder:
    """All buckets are written to an empty folder that the servers can read, and they are told to load it."""

    path = "/update_weights_from_disk"

    def __init__(self, each: Each, folder: Path) -> None:
        self.each, self.folder, self.parts, self.requests = each, folder, 0, 0
        (folder / MODULE).mkdir()

    def send(self, bucket: Mapping[str, Tensor]) -> None:
        self.parts += 1
        save_file(dict(bucket), self.folder / MODULE / f"part-{self.parts:05}.safetensors")

    def finish(self) -> None:
        body = {"model_path": str(self.folder.resolve()), "flush_cache": True, "target_modules": [MODULE]}
        self.each(lambda client: client.succeed(self.path, body))
        self.requests += 1


Transport = InRequests | ThroughFolder

# -- verification -----------------------------------------------------------------------------------------------------


def digest(value: Tensor) -> str:
    """SHA-256 as the server's /update_weights_from_tensor_checker computes it."""
    hasher = hashlib.sha256(str(value.dtype).encode())
    hasher.update(repr(tuple(value.shape)).encode())
    hasher.update(value.contiguous().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def sampled(names: Iterable[str], version: int) -> frozenset[str]:
    """Some of the tensors of an update, others for each version."""
    draw = {name: hashlib.blake2b(f"{version} {name}".encode()).digest() for name in names}
    return frozenset(heapq.nsmallest(SAMPLED, draw, key=lambda name: draw[name]))


def compare(client: Client, digests: Mapping[str, str], module: str = MODULE) -> None:
    """Raises EngineError unless the server holds exactly these tensors."""
    body = {"target_module": module, "expected_named_tensors_sha256": dict(digests)}
    try:
        client.succeed("/update_weights_from_tensor_checker", body)
    except EngineRefused as error:
        reason = str(error).partition("; asked:")[0].partition("status 400: ")[2] or error
        raise EngineError(f"{client.url} does not hold the weights that it was sent: {reason}") from error


def pipeline_checksum(component: Path, dtype_of: Callable[[str], torch.dtype]) -> str:
    """``probe.checksum`` of a server that holds exactly what a pipeline directory stores of its network."""
    stored = LazyTensors(weight_files(component))
    hasher = hashlib.sha256()
    for name in sorted(stored):
        hasher.update(name.encode())
        value = stored[name].to(dtype_of(name)).contiguous()
        hasher.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


# -- update -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """Parameters as servers name and hold them."""

    fixed: frozenset[str]
    """Tables that no training changes."""
    dtype: torch.dtype
    stored: Mapping[str, tuple[int, ...]]
    """name -> shape in the pipeline directory: those of a server that does not tell its own."""

    def parameters(self, member: Member) -> Mapping[str, tuple[int, ...]]:
        known = member.capabilities.parameters
        if known is None or member.capabilities.tp_size > 1:  # which tells the shapes of one device's shards
            return self.stored
        return {name: shape for name, (shape, _) in known.items()}

    def dtype_at(self, members: Sequence[Member]) -> Callable[[str], torch.dtype]:
        told = {
            name: dtype for member in members for name, (_, dtype) in (member.capabilities.parameters or {}).items()
        }

        def dtype_of(name: str) -> torch.dtype:
            if name in told:
                found: torch.dtype = getattr(torch, told[name].removeprefix("torch."))
                return found
            return torch.float32 if name in self.fixed else self.dtype

        return dtype_of


def cast(bucket: Mapping[str, Tensor], dtype_of: Callable[[str], torch.dtype]) -> dict[str, Tensor]:
    """Cast to what the server holds: half the bytes where it computes in bf16, and the same bytes to compare."""
    return {name: value.detach().to(dtype_of(name)).contiguous() for name, value in bucket.items()}


class Update:
    """One update, whole and as it was sent, or it fails: with the failure of one of ``must``, which are admitted. A
    member of ``may`` that fails stays evicted."""

    def __init__(self, version: int, network: Network, *, must: Sequence[Member], may: Sequence[Member]) -> None:
        self.version, self.network, self.must, self._may = version, network, tuple(must), list(may)

    @property
    def returned(self) -> tuple[Member, ...]:
        """Members of ``may`` that have taken all of it so far."""
        return tuple(self._may)

    @property
    def members(self) -> tuple[Member, ...]:
        return (*self.must, *self._may)

    def each(self, call: Callable[[Client], None]) -> None:
        self._each(self.members, lambda member: call(member.client))

    def _each(self, members: Sequence[Member], call: Callable[[Member], None]) -> None:
        for member, error in outcomes(members, call):
            if error and member in self.must:
                raise error
            if error:
                log.warning("%s stays evicted: %s", member.client.url, error)
                member.evicted = str(error)
                self._may.remove(member)
            if error and not self.members:
                raise EngineError(f"no SGLang server took the weights of version {self.version}: {error}") from error

    def push(self, buckets: Iterable[Mapping[str, Tensor]], transport: Transport, options: Options) -> None:
        dtype_of = self.network.dtype_at(self.members)
        which = options.verify_weights
        whole = [m for m in self.members if which == "every" or (which == "first" and not m.compared)]
        chosen = self._chosen(options)
        digests: dict[str, str] = {}
        names: set[str] = set()
        before = {
            member: (member.capabilities.updates, member.client.attempts[transport.path]) for member in self.members
        }
        for bucket in buckets:
            self._each(self.members, functools.partial(self._refuse_unknown, bucket))
            sent = cast(bucket, dtype_of)
            transport.send(sent)
            names |= sent.keys()
            digests |= {name: digest(sent[name]) for name in (sent if whole else sent.keys() & chosen)}
        self._each(self.members, functools.partial(self._refuse_missing, names))
        transport.finish()
        few = {name: digests[name] for name in names & chosen}
        self._each(self.members, lambda member: _verify(member, digests if member in whole else few))
        self._each(self.members, lambda member: self._require_taken(member, *before[member], transport))
        for member in self.members:
            member.version = self.version
            member.compared |= member in whole

    def _chosen(self, options: Options) -> frozenset[str]:
        """Names of the tensors that are compared at servers where not all are."""
        interval = options.verify_weights_interval
        if options.verify_weights != "first" or not interval or self.version % interval:
            return frozenset()
        names = {name for member in self.members for name in self.network.parameters(member)}
        return sampled(names - self.network.fixed, self.version)

    def _require_taken(self, member: Member, updates: int | None, attempts: int, transport: Transport) -> None:
        """A server counts the requests that it has applied, whatever it answered to them."""
        now = member.capabilities.updates
        if now is None or updates is None:
            return
        applied, made = now - updates, member.client.attempts[transport.path] - attempts
        if not transport.requests <= applied <= made:  # one that was repeated may have been applied twice
            raise EngineError(
                f"{member.client.url} was sent {transport.requests} parts of weights of version {self.version}, and "
                f"has applied {applied}: it dropped some, or {CHANGED}"
            )

    def _refuse_unknown(self, bucket: Mapping[str, Tensor], member: Member) -> None:
        """SGLang would skip such a name, and say that all is well."""
        known, where = self.network.parameters(member), f"{member.client.url}: weights of version {self.version}"
        if unknown := sorted(bucket.keys() - known.keys()):
            raise EngineError(f"{where} name {unknown[:4]}, which the network does not have")
        for name, value in bucket.items():
            if tuple(value.shape) != known[name]:
                raise EngineError(f"{where}: {name} has shape {tuple(value.shape)}, there {known[name]}")

    def _refuse_missing(self, names: set[str], member: Member) -> None:
        if missing := sorted(self.network.parameters(member).keys() - names - self.network.fixed):
            raise EngineError(
                f"{member.client.url}: weights of version {self.version} lack {missing[:4]} ({len(missing)} parameters)"
            )


def _verify(member: Member, digests: Mapping[str, str]) -> None:
    """Compare these tensors, and renew what is known of the server after an update."""
    if digests:
        compare(member.client, digests)
    known = member.capabilities
    member.capabilities = replace(report(member.client, known.version), tp_size=known.tp_size)
    # by which it is known later, of a server that counts no updates, that nobody else has changed the weights
    member.checksum = checksum(member.client) if member.capabilities.updates is None else ""
