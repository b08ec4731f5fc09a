"""Weight updates of SGLang's language-model servers: a session of requests, then a comparison by SHA-256.

A server drops names that it does not know, and dies of a shape that does not fit: both are found before anything is
sent. It holds some matrices as one, rows below rows, and pads the rows of the vocabulary.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from miles_dmd.client import Client
from miles_dmd.engines.sglang.delivery import Delivery, InRequests, Transport, sampled
from miles_dmd.engines.sglang.language.fleet import TokenServer, held, name_weights
from miles_dmd.errors import EngineError, EngineRefused

if TYPE_CHECKING:
    from miles_dmd.engines.sglang import Options

STACKED = {
    ".qkv_proj.": (".q_proj.", ".k_proj.", ".v_proj."),
    ".gate_up_proj.": (".gate_proj.", ".up_proj."),
}
"""SGLang's name -> those of a checkpoint."""
VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
ROWS = 64
"""SGLang pads the vocabulary to a multiple of it, with zeros."""


class Expected:
    """Digests that a server will tell of an update, made as its tensors pass by."""

    def __init__(self, chosen: frozenset[str] | None = None) -> None:
        """``chosen``: names of a checkpoint of which digests are wanted; all of them without."""
        self.chosen, self.digests, self.names = chosen, dict[str, str](), set[str]()
        self._waiting: dict[str, dict[str, Tensor]] = {}

    def add(self, bucket: Mapping[str, Tensor]) -> None:
        for name, value in bucket.items():
            self.names.add(name)
            whole, parts = stacked_name(name)
            if self.chosen is not None and not self.chosen.intersection(parts):
                continue
            waiting = self._waiting.setdefault(whole, {})
            waiting[name] = value
            if len(waiting) == len(parts):
                self.digests[whole] = digest(whole, torch.cat([waiting[part] for part in parts]))
                del self._waiting[whole]


def stacked_name(name: str) -> tuple[str, tuple[str, ...]]:
    """(SGLang's name of the matrix that a tensor is part of, all parts of it in order)."""
    for whole, parts in STACKED.items():
        for part in parts:
            if part in name:
                return name.replace(part, whole), tuple(name.replace(part, other) for other in parts)
    return name, (name,)


def digest(name: str, value: Tensor) -> str:
    if name.endswith(VOCABULARY):
        value = pad(value, (0, 0, 0, -len(value) % ROWS))
    return hashlib.sha256(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def compare(member: TokenServer, expected: Mapping[str, str]) -> None:
    """Raises EngineError unless the server holds exactly these tensors; nothing of one that cannot be compared."""
    if not expected or not member.compares:
        return
    found = held(member.client)
    unknown = sorted(expected.keys() - found.keys())
    if unknown == ["lm_head.weight"]:  # tied to the embedding, which is compared
        unknown = []
    wrong = sorted(name for name in expected.keys() & found.keys() if not expected[name].startswith(found[name]))
    for names, what in ((unknown, "has no"), (wrong, "holds another")):
        if names:
            raise EngineError(
                f"{member.client.url} does not hold the weights that it was sent: it {what} {names[0]} "
                f"({len(names)} of {len(expected)} tensors)"
            )


# -- update -----------------------------------------------------------------------------------------------------------


class Update:
    """One delivery to language-model servers, compared."""

    def __init__(
        self, delivery: Delivery[TokenServer], stored: Mapping[str, tuple[int, ...]], dtype: torch.dtype, tag: str
    ) -> None:
        """``stored``: shapes of the checkpoint's tensors; ``tag``: name of the new weights."""
        self.delivery, self.stored, self.dtype, self.tag = delivery, stored, dtype, tag

    def push(self, buckets: Iterable[Mapping[str, Tensor]], transport: Transport, options: Options) -> None:
        whole = self._whole(options)
        expected = Expected(None if whole else self._chosen(options))
        in_requests = isinstance(transport, InRequests)
        if in_requests:
            self.delivery.each(begin)
        for bucket in buckets:
            self._refuse_foreign(bucket)
            sent = {name: value.detach().to(self.dtype).contiguous() for name, value in bucket.items()}
            transport.send(sent)
            expected.add(sent)
        if missing := sorted(self.stored.keys() - expected.names):
            raise EngineError(f"{self._what} lack {missing[:4]} ({len(missing)} parameters)")
        transport.finish()
        if in_requests:
            self.delivery.each(lambda client: client.succeed("/end_weight_update", {}))
        self.delivery.each(lambda client: _discard(client.content("/flush_cache", {})))
        self.delivery.each_member(lambda member: compare(member, expected.digests))
        # a name only once all is there: a sample of half an update has none that anybody takes
        self.delivery.each_member(lambda member: name_weights(member, self.tag))
        for member in self.delivery.members:
            member.version = self.delivery.version
            member.compared |= whole

    @property
    def _what(self) -> str:
        return f"weights of version {self.delivery.version}"

    def _whole(self, options: Options) -> bool:
        fresh = any(not member.compared for member in self.delivery.members)
        return options.verify_weights == "every" or (options.verify_weights == "first" and fresh)

    def _chosen(self, options: Options) -> frozenset[str]:
        interval = options.verify_weights_interval
        if options.verify_weights != "first" or not interval or self.delivery.version % interval:
            return frozenset()
        return sampled(self.stored, self.delivery.version)

    def _refuse_foreign(self, bucket: Mapping[str, Tensor]) -> None:
        for name, value in bucket.items():
            if name not in self.stored:
                raise EngineError(f"{self._what} name {name}, which the checkpoint does not have")
            if tuple(value.shape) != self.stored[name]:
                shapes = f"shape {tuple(value.shape)}, in the checkpoint {self.stored[name]}"
                raise EngineError(f"{self._what}: {name} has {shapes}")


def begin(client: Client) -> None:
    """Open a session, after closing one that somebody has left open."""
    try:
        client.succeed("/begin_weight_update", {})
    except EngineRefused:
        with contextlib.suppress(EngineRefused):
            client.succeed("/end_weight_update", {})
        client.succeed("/begin_weight_update", {})


def _discard(_: bytes) -> None: ...
