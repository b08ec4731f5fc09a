"""Weight updates of SGLang's diffusion servers: names and shapes, and verification."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from miles_dmd.client import Client
from miles_dmd.engines.sglang.delivery import Delivery, Transport, sampled
from miles_dmd.engines.sglang.denoiser_fleet import Denoiser
from miles_dmd.engines.sglang.fleet import CHANGED
from miles_dmd.engines.sglang.probe import MODULE, checksum, report
from miles_dmd.errors import EngineError, EngineRefused
from miles_dmd.pipelines.weights import weight_files
from miles_dmd.training.export import LazyTensors

if TYPE_CHECKING:
    from miles_dmd.engines.sglang import Options

# -- verification -----------------------------------------------------------------------------------------------------


def digest(value: Tensor) -> str:
    """SHA-256 as the server's /update_weights_from_tensor_checker computes it."""
    hasher = hashlib.sha256(str(value.dtype).encode())
    hasher.update(repr(tuple(value.shape)).encode())
    hasher.update(value.contiguous().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


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

    def parameters(self, member: Denoiser) -> Mapping[str, tuple[int, ...]]:
        known = member.capabilities.parameters
        if known is None or member.capabilities.tp_size > 1:  # which tells the shapes of one device's shards
            return self.stored
        return {name: shape for name, (shape, _) in known.items()}

    def dtype_at(self, members: Sequence[Denoiser]) -> Callable[[str], torch.dtype]:
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
    """One delivery to denoisers, compared."""

    def __init__(self, delivery: Delivery[Denoiser], network: Network) -> None:
        self.delivery, self.version, self.network = delivery, delivery.version, network

    @property
    def members(self) -> tuple[Denoiser, ...]:
        return self.delivery.members

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
            self.delivery.each_member(functools.partial(self._refuse_unknown, bucket))
            sent = cast(bucket, dtype_of)
            transport.send(sent)
            names |= sent.keys()
            digests |= {name: digest(sent[name]) for name in (sent if whole else sent.keys() & chosen)}
        self.delivery.each_member(functools.partial(self._refuse_missing, names))
        transport.finish()
        few = {name: digests[name] for name in names & chosen}
        self.delivery.each_member(lambda member: _verify(member, digests if member in whole else few))
        self.delivery.each_member(lambda member: self._require_taken(member, *before[member], transport))
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

    def _require_taken(self, member: Denoiser, updates: int | None, attempts: int, transport: Transport) -> None:
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

    def _refuse_unknown(self, bucket: Mapping[str, Tensor], member: Denoiser) -> None:
        """SGLang would skip such a name, and say that all is well."""
        known, where = self.network.parameters(member), f"{member.client.url}: weights of version {self.version}"
        if unknown := sorted(bucket.keys() - known.keys()):
            raise EngineError(f"{where} name {unknown[:4]}, which the network does not have")
        for name, value in bucket.items():
            if tuple(value.shape) != known[name]:
                raise EngineError(f"{where}: {name} has shape {tuple(value.shape)}, there {known[name]}")

    def _refuse_missing(self, names: set[str], member: Denoiser) -> None:
        if missing := sorted(self.network.parameters(member).keys() - names - self.network.fixed):
            raise EngineError(
                f"{member.client.url}: weights of version {self.version} lack {missing[:4]} ({len(missing)} parameters)"
            )


def _verify(member: Denoiser, digests: Mapping[str, str]) -> None:
    """Compare these tensors, and renew what is known of the server after an update."""
    if digests:
        compare(member.client, digests)
    known = member.capabilities
    member.capabilities = replace(report(member.client, known.version), tp_size=known.tp_size)
    # by which it is known later, of a server that counts no updates, that nobody else has changed the weights
    member.checksum = checksum(member.client) if member.capabilities.updates is None else ""
