"""Fleet of SGLang's language-model servers: admission, versions of weights by name, sleep of those that are idle."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles_dmd.client import Client, Patience
from miles_dmd.engines.sglang import Options
from miles_dmd.engines.sglang.fleet import CHANGED, SLEEP, WAKE, Fleet, Member
from miles_dmd.engines.sglang.preflight import numbers
from miles_dmd.errors import EngineRefused, EngineUnavailable

MINIMUM = (0, 5, 23)
"""The release whose sessions of weight updates, and whose answers, were tried."""
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16"}
BIASED = ("preferred_sampling_params", "enable_watermark")
"""Settings of a server that change what it samples from, whatever a request says."""
SHORT = 16
"""Hexadecimal digits of a stock server's digests; those of our plugin are whole."""
Probe = Callable[["TokenServer", Patience], None]
"""Takes a sample of a few tokens. Raises EngineError."""


@dataclass(eq=False)
class TokenServer(Member):
    release: str = field(kw_only=True)
    device: str = field(kw_only=True)
    tp_size: int = field(kw_only=True)
    tag: str = ""
    """Name of the weights that it was sent, which each of its samples repeats."""
    compares: bool = field(kw_only=True)
    """True if what it tells of its weights can be computed here."""
    repeats: bool = False
    """True if a seed gives the same sample again."""

    def __str__(self) -> str:
        repeats = (
            "repeats a sample by its seed" if self.repeats else "draws another sample each time, without our plugin"
        )
        compares = "" if self.compares else "; its weights are not compared"
        return f"{self.client.url}: SGLang {self.release}, {repeats}{compares}"


class TokenFleet(Fleet[TokenServer]):
    def __init__(self, clients: Sequence[Client], options: Options, dtype: str, longest: int, probe: Probe) -> None:
        """``longest``: tokens of the longest prompt with its response."""
        self.dtype, self.longest, self.probe = dtype, longest, probe
        self.run = secrets.token_hex(4)
        super().__init__(clients, options)

    def tag(self, version: int) -> str:
        """Name of the weights of a version: of this run alone, so that those of a restarted server never have it."""
        return f"{self.run}-{version}"

    def _introduced(self, client: Client) -> TokenServer:
        server = self._asked(client)
        name_weights(server, self.tag(0), self.patience)
        server.version = 0
        self.probe(server, self.first_sample)
        return server

    def _asked(self, client: Client) -> TokenServer:
        """A server of unknown weights. Raises EngineRefused for one that cannot be used, with the reason."""
        info = client.get("/server_info", patience=self.patience)
        model = client.get("/model_info", patience=self.patience)
        require_usable(client.url, info, model, self.dtype, self.longest)
        size, device = info.get("tp_size"), str(info.get("device"))
        digests = held(client) if size == 1 else {}
        return TokenServer(
            client,
            release=str(info.get("version")),
            device=device,
            tp_size=size if isinstance(size, int) else 1,
            compares=bool(digests) and (device == "cpu" or min(map(len, digests.values())) > SHORT),
        )

    def _renew(self, member: TokenServer) -> None:
        found = self._asked(member.client)
        member.release, member.device = found.release, found.device
        member.tp_size, member.compares = found.tp_size, found.compares
        if member.slept and weights_name(member.client, self.patience) == member.tag:  # else it was restarted, awake
            self._switch(member, False, self.patience)

    def _require_same_samples(self, member: TokenServer) -> None:
        self.probe(member, self.patience)

    def _require_unchanged(self, member: TokenServer) -> None:
        found = weights_name(member.client, self.patience)
        if found != member.tag:
            raise EngineUnavailable(f"{member.client.url} holds weights {found}, and was sent {member.tag}: {CHANGED}")

    def _settled(self, member: TokenServer, asleep: bool) -> None:
        self._require_unchanged(member)
        self._switch(member, asleep, self.patience)

    def _switch(self, member: TokenServer, asleep: bool, patience: Patience) -> None:
        """A server that is awake is never woken, which would end it (0.5.23), nor one put to sleep that is busy."""
        if member.slept == asleep:
            return
        if asleep:
            member.client.content("/flush_cache", {}, patience=patience)  # refused while a request is under way
            member.slept = True  # also where the answer does not come
            member.client.content(SLEEP, {}, patience=patience)
        else:
            self._require_unchanged(member)
            member.client.content(WAKE, {}, patience=Patience(patience.timeout, 0.0, patience.flag))  # never twice
            member.slept = False


def require_usable(
    url: str, info: Mapping[str, Any], model: Mapping[str, Any], dtype: str, longest: int
) -> None:  # fmt: skip
    """Raises EngineRefused for a server that cannot sample for the run, with the cure."""
    release = str(info.get("version", ""))
    if not release or numbers(release) < MINIMUM:
        wanted = ".".join(map(str, MINIMUM))
        raise EngineRefused(f"{url} runs SGLang {release or 'of unknown version'}; install {wanted} or later")
    if model.get("is_generation") is not True:
        kind = (model.get("architectures") or ["nothing known"])[0]
        raise EngineRefused(f"{url} serves {kind}, which generates no text: serve --hf-checkpoint there")
    if info.get("dtype") not in ("auto", PRECISIONS[dtype]):
        raise EngineRefused(
            f"{url} computes in {info.get('dtype')}, and --compute-dtype is {dtype}: start it with --dtype "
            f"{PRECISIONS[dtype]}"
        )
    if set_ := [name for name in BIASED if model.get(name) or info.get(name)]:
        flag = set_[0].replace("_", "-")
        raise EngineRefused(f"{url} has --{flag}, so it samples from other distributions: start it without")
    room = info.get("max_req_input_len")
    if isinstance(room, int) and room < longest:
        raise EngineRefused(
            f"{url} has room for {room} tokens, and a prompt with its response may have {longest}: start it with more "
            "--context-length and --max-total-tokens, or lower --max-prompt-tokens or --max-new-tokens"
        )


def held(client: Client) -> dict[str, str]:
    """SHA-256 of each tensor that a server on one device holds, by its own names; of its first 64 bits, without our
    plugin, and on a GPU something else then."""
    ranks = client.post("/weights_checker", {"action": "checksum"}).get("ranks")
    return dict(ranks[0]["checksums"]) if isinstance(ranks, list) and ranks else {}


def weights_name(client: Client, patience: Patience | None = None) -> str:
    return str(client.get("/model_info", patience=patience).get("weight_version"))


def name_weights(member: TokenServer, tag: str, patience: Patience | None = None) -> None:
    """Give what the server holds a name, which its samples repeat from now on."""
    member.client.succeed(
        "/update_weight_version", {"new_version": tag, "abort_all_requests": False}, patience=patience
    )  # fmt: skip
    member.tag = tag
