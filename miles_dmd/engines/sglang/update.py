"""One weight update: all admitted servers take it, whole and as it was sent, or it fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from miles_dmd.engines.sglang import weights
from miles_dmd.engines.sglang.client import Client
from miles_dmd.engines.sglang.pool import Member, outcomes
from miles_dmd.engines.sglang.probe import report
from miles_dmd.errors import EngineError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Network:
    """What servers call their parameters, and hold them as."""

    fixed: frozenset[str]
    """Tables that no training changes."""
    dtype: torch.dtype
    stored: Mapping[str, tuple[int, ...]]
    """name -> shape in the checkpoint: what a server holds that does not tell its own."""

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


@dataclass(frozen=True)
class Verify:
    """Which updates are compared with what the servers then hold."""

    which: Literal["first", "every", "off"]
    interval: int
    """With "first": updates from one comparison of some tensors to the next; 0 for none."""


@dataclass(frozen=True)
class _Taken:
    """How many weight updates a server has had."""

    updates: int | None
    """By its own count."""
    attempts: int
    """By the requests that were made."""

    @classmethod
    def by(cls, member: Member, transport: weights.Transport) -> _Taken:
        return cls(member.capabilities.updates, member.client.attempts[transport.path])


class Update:
    """``must`` are admitted, and the failure of one is the update's; of ``may``, who fails stays out."""

    def __init__(self, version: int, network: Network, *, must: Sequence[Member], may: Sequence[Member]) -> None:
        self.version, self.network, self.must, self._may = version, network, tuple(must), list(may)

    @property
    def returned(self) -> tuple[Member, ...]:
        """Those of ``may`` that have taken all of it so far."""
        return tuple(self._may)

    @property
    def members(self) -> tuple[Member, ...]:
        return (*self.must, *self._may)

    def each(self, call: Callable[[Client], Any]) -> None:
        self._each(self.members, lambda member: call(member.client))

    def _each(self, members: Sequence[Member], call: Callable[[Member], Any]) -> None:
        for member, error in outcomes(members, call):
            if error and member in self.must:
                raise error
            if error:
                self._drop(member, error)

    def _drop(self, member: Member, error: EngineError) -> None:
        log.warning("%s stays out: %s", member.client.url, error)
        member.wrong = str(error)
        self._may.remove(member)
        if not self.members:
            raise EngineError(f"no SGLang server took the weights of version {self.version}: {error}") from error

    def push(self, buckets: Iterable[Mapping[str, Tensor]], transport: weights.Transport, verify: Verify) -> None:
        dtype_of = self.network.dtype_at(self.members)
        whole = [m for m in self.members if verify.which == "every" or (verify.which == "first" and not m.compared)]
        chosen = self._chosen(verify)
        digests: dict[str, str] = {}
        names: set[str] = set()
        before = {member: _Taken.by(member, transport) for member in self.members}
        for bucket in buckets:
            self._each(self.members, lambda member, bucket=bucket: self._refuse_unknown(bucket, member))  # type: ignore[misc]
            sent = weights.cast(bucket, dtype_of)
            transport.send(sent)
            names |= sent.keys()
            wanted = sent.keys() if whole else sent.keys() & chosen
            digests |= {name: weights.digest(sent[name]) for name in wanted}
        self._each(self.members, lambda member: self._refuse_missing(names, member))
        transport.finish()
        self._each([m for m in whole if m in self.members], lambda member: _compare(member, digests))
        few = {name: digests[name] for name in names & chosen}
        self._each([m for m in self.members if few and m not in whole], lambda m: weights.compare(m.client, few))
        self._each(self.members, _refresh)
        self._each(self.members, lambda member: self._require_taken(member, before[member], transport))
        self._each(self.members, _note_checksum)
        for member in self.members:
            member.version = self.version

    def _chosen(self, verify: Verify) -> frozenset[str]:
        """Names of the tensors that are compared at servers where not all are."""
        if verify.which != "first" or not verify.interval or self.version % verify.interval:
            return frozenset()
        names = {name for member in self.members for name in self.network.parameters(member)}
        return weights.sampled(names - self.network.fixed, self.version)

    def _require_taken(self, member: Member, before: _Taken, transport: weights.Transport) -> None:
        """A server counts the requests that it has applied, whatever it answered to them."""
        now = _Taken.by(member, transport)
        if now.updates is None or before.updates is None:
            return
        applied, made = now.updates - before.updates, now.attempts - before.attempts
        if not transport.requests <= applied <= made:  # one that was repeated may have been applied twice
            raise EngineError(
                f"{member.client.url} was sent {transport.requests} parts of weights of version {self.version}, and "
                f"has applied {applied}: it dropped some, or somebody else updates it"
            )

    def _refuse_unknown(self, bucket: Mapping[str, Tensor], member: Member) -> None:
        """SGLang would skip such a name, and say that all is well."""
        known, url = self.network.parameters(member), member.client.url
        if unknown := sorted(bucket.keys() - known.keys()):
            raise EngineError(
                f"weights of version {self.version} name {unknown[:4]}, which the network does not have ({url})"
            )
        for name, value in bucket.items():
            if tuple(value.shape) != known[name]:
                raise EngineError(
                    f"weights of version {self.version}: {name} has shape {tuple(value.shape)}, and {known[name]} at "
                    f"{url}"
                )

    def _refuse_missing(self, names: set[str], member: Member) -> None:
        if missing := sorted(self.network.parameters(member).keys() - names - self.network.fixed):
            raise EngineError(
                f"weights of version {self.version} lack {missing[:4]} ({len(missing)} parameters in all) that "
                f"{member.client.url} has"
            )


def _compare(member: Member, digests: Mapping[str, str]) -> None:
    weights.compare(member.client, digests)
    member.compared = True


def _refresh(member: Member) -> None:
    known = member.capabilities
    member.capabilities = replace(report(member.client, known.version), tp_size=known.tp_size)


def _note_checksum(member: Member) -> None:
    """By which it is known later, of a server that counts no updates, that nobody else has changed the weights."""
    member.checksum = weights.checksum(member.client) if member.capabilities.updates is None else ""
