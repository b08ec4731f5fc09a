"""Delivery of weights to servers: in requests or through a folder, to all of them or with the failure of one."""

from __future__ import annotations

import base64
import hashlib
import heapq
import logging
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic

from safetensors.torch import save_file
from torch import Tensor

from miles_dmd.client import Client
from miles_dmd.engines.sglang.fleet import M, outcomes
from miles_dmd.errors import EngineError

log = logging.getLogger(__name__)

SAMPLED = 16
"""Tensors of an update that are compared where not all of them are."""
Each = Callable[[Callable[[Client], None]], None]
"""Makes a call for every server that takes the update, at once."""


class InRequests:
    """Each bucket is a request's body: what a server on a CPU takes, whose unpickler admits tensors and little else.

    ``more`` are the fields that every request has beside its tensors."""

    path = "/update_weights_from_tensor"

    def __init__(self, each: Each, more: Mapping[str, Any]) -> None:
        self.each, self.more = each, more
        self.requests = 0
        """Requests that each server has had to take so far."""

    def send(self, bucket: Mapping[str, Tensor]) -> None:
        payload = base64.b64encode(pickle.dumps(list(bucket.items()))).decode()
        body = {"serialized_named_tensors": [payload], **self.more}
        self.each(lambda client: client.succeed(self.path, body))
        self.requests += 1

    def finish(self) -> None: ...


class ThroughFolder:
    """All buckets are written to an empty folder that the servers can read, and they are told to load it.

    ``part`` is the folder's part in which they look for them."""

    path = "/update_weights_from_disk"

    def __init__(self, each: Each, more: Mapping[str, Any], folder: Path, part: str = "") -> None:
        self.each, self.more, self.folder, self.parts, self.requests = each, more, folder, 0, 0
        self.place = folder / part
        self.place.mkdir(exist_ok=True)

    def send(self, bucket: Mapping[str, Tensor]) -> None:
        self.parts += 1
        save_file(dict(bucket), self.place / f"part-{self.parts:05}.safetensors")

    def finish(self) -> None:
        body = {"model_path": str(self.folder.resolve()), "flush_cache": True, **self.more}
        self.each(lambda client: client.succeed(self.path, body))
        self.requests += 1


Transport = InRequests | ThroughFolder


def sampled(names: Iterable[str], version: int) -> frozenset[str]:
    """Some of the tensors of an update, others for each version."""
    draw = {name: hashlib.blake2b(f"{version} {name}".encode()).digest() for name in names}
    return frozenset(heapq.nsmallest(SAMPLED, draw, key=lambda name: draw[name]))


class Delivery(Generic[M]):
    """One update, whole and as it was sent, or it fails: with the failure of one of ``must``, which are admitted. A
    member of ``may`` that fails stays evicted."""

    def __init__(self, version: int, *, must: Sequence[M], may: Sequence[M]) -> None:
        self.version, self.must, self._may = version, tuple(must), list(may)

    @property
    def returned(self) -> tuple[M, ...]:
        """Members of ``may`` that have taken all of it so far."""
        return tuple(self._may)

    @property
    def members(self) -> tuple[M, ...]:
        return (*self.must, *self._may)

    def each(self, call: Callable[[Client], None]) -> None:
        self.each_member(lambda member: call(member.client))

    def each_member(self, call: Callable[[M], None]) -> None:
        for member, error in outcomes(self.members, call):
            if error and member in self.must:
                raise error
            if error:
                log.warning("%s stays evicted: %s", member.client.url, error)
                member.evicted = str(error)
                self._may.remove(member)
            if error and not self.members:
                raise EngineError(f"no SGLang server took the weights of version {self.version}: {error}") from error
