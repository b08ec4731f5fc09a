"""One weight update: all admitted servers take it, whole and as it was sent, or it fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    """name -> shape in the checkpoint: what a server holds that does not tell."""

    def parameters(self, member: Member) -> Mapping[str, tuple[int, ...]]:
        known = member.capabilities.parameters
        return self.stored if known is None else {name: shape for name, (shape, _) in known.items()}

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

    def push(
        self,
        buckets: Iterable[Mapping[str, Tensor]],
        transport: weights.Transport,
        verify: Literal["first", "every", "off"],
    ) -> None:
        dtype_of = self.network.dtype_at(self.members)
        compared = [m for m in self.members if verify == "every" or (verify == "first" and not m.compared)]
        digests: dict[str, str] = {}
        names: set[str] = set()
        for bucket in buckets:
            self._each(self.members, lambda member, bucket=bucket: self._refuse_unknown(bucket, member))  # type: ignore[misc]
            sent = weights.cast(bucket, dtype_of)
            transport.send(sent)
            names |= sent.keys()
            digests |= {name: weights.digest(value) for name, value in sent.items()} if compared else {}
        self._each(self.members, lambda member: self._refuse_missing(names, member))
        transport.finish()
        self._each([m for m in compared if m in self.members], lambda member: _compare(member, digests))
        self._each(self.members, _note_state)
        for member in self.members:
            member.version = self.version

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


def _note_state(member: Member) -> None:
    """By which it is known later that nobody else has changed the weights."""
    member.capabilities = report(member.client, member.capabilities.version)
    member.checksum = weights.checksum(member.client) if member.capabilities.updates is None else ""
