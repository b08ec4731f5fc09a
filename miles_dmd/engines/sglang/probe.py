"""Capability and parity probe of a server, when it is admitted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from miles_dmd.client import Client, Patience
from miles_dmd.engines.sglang.preflight import identify
from miles_dmd.engines.sglang.wire import PROTOCOL, ROLLOUT, Ask, Sample, Sampling, read_answer, request_body
from miles_dmd.errors import EngineMisanswer, EngineRefused

MODULE = "transformer"
"""SGLang's name of the denoising network, and its folder in a pipeline directory."""
REPORT = "miles_dmd:report"
"""Asked of /get_weights_checksum as if it were a module; a server without the plugin has no such module."""
SEED = 2**62 + 12345
"""Seed of the probe's samples; a server that cuts seeds to 32 bits would draw something else."""
TOLERANCE = {"fp32": 1e-4, "bf16": 0.1}


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    version: str
    plugin: str = ""
    """Version of our plugin; empty where it is not there."""
    cannot_stop: str = "it has no plugin of ours"
    """Reason for which the server cannot stop at a step; empty where it can."""
    device: str = "unknown"
    parameters: Mapping[str, tuple[tuple[int, ...], str]] | None = None
    """name -> (shape, dtype) of the network's parameters; None where the server does not tell."""
    updates: int | None = None
    """Weight updates since the server started."""
    asleep: bool = False
    tp_size: int = 1
    """Devices over which its network is sharded."""

    @property
    def stops(self) -> bool:
        return not self.cannot_stop

    def __str__(self) -> str:
        stops = f"stops at the requested step (plugin {self.plugin})"
        captures = f"runs all steps and keeps one of them, because {self.cannot_stop}"
        return f"SGLang {self.version}, {stops if self.stops else captures}"


def probe(client: Client, pipeline: str, *, patience: Patience | None = None) -> Capabilities:
    """Raises EngineRefused for a server that cannot be used, with the reason."""
    who = identify(client, pipeline, patience=patience)
    return replace(report(client, who.version, patience=patience), tp_size=who.tp_size)


def report(client: Client, version: str, *, patience: Patience | None = None) -> Capabilities:
    """Report of our plugin there, fresh."""
    answer = client.post("/get_weights_checksum", {"module_names": [REPORT]}, patience=patience).get(REPORT)
    if not isinstance(answer, dict):
        return Capabilities(version=version)
    if answer.get("protocol") != PROTOCOL:
        raise EngineRefused(
            f"{client.url} has our plugin with protocol {answer.get('protocol')}, this is {PROTOCOL}: install this "
            "version's sglang_plugin/ into the server's environment"
        )
    try:
        return Capabilities(
            version=version,
            plugin=str(answer["plugin"]),
            cannot_stop=str(answer["cannot_stop"]),
            device=str(answer["device"]),
            parameters={name: (tuple(shape), dtype) for name, (shape, dtype) in answer["parameters"].items()},
            updates=int(answer["counters"]["updates"]),
            asleep=bool(answer["asleep"]),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise EngineMisanswer(f"{client.url}: our plugin's report lacks or garbles {error}") from error


def checksum(client: Client) -> str:
    """SHA-256 over names and bytes of all parameters of the server's network."""
    return str(client.post("/get_weights_checksum", {"module_names": [MODULE]}).get(MODULE))


def take_sample(
    client: Client, sampling: Sampling, capabilities: Capabilities, text: str, seed: int, stop_step: int,
    *, patience: Patience | None = None,
) -> Sample:  # fmt: skip
    ask = Ask(text=text, seed=seed, stop_step=stop_step, stops=capabilities.stops)
    body = client.content(ROLLOUT, request_body(sampling, ask), patience=patience)
    return read_answer(body, sampling, ask, client.url)


def sampling_mismatch(
    client: Client, sampling: Sampling, capabilities: Capabilities, text: str, dtype: str,
    *, patience: Patience | None = None,
) -> str:  # fmt: skip
    """Difference of the server's noise and steps from the in-process engine's; empty where there is none.

    Ours: one CPU generator a sample, which draws the initial latents and then one tensor per re-noised step.
    """
    first = take_sample(client, sampling, capabilities, text, SEED, 0, patience=patience)
    own = torch.Generator().manual_seed(SEED)
    if not _close(first.latents, torch.randn(sampling.shape, generator=own), dtype):
        return "its initial latents are not those of a CPU generator with the request's seed"
    if len(sampling.sigmas) == 1:
        return ""
    second = take_sample(client, sampling, capabilities, text, SEED, 1, patience=patience)
    level, to = sampling.sigmas[:2]
    if sampling.solver == "euler":
        expected = first.latents + (to - level) * (first.latents - first.clean) / level
    else:
        expected = (1 - to) * first.clean + to * torch.randn(sampling.shape, generator=own)
    return "" if _close(second.latents, expected, dtype) else f"its first {sampling.solver} step is another one"


def _close(found: torch.Tensor, expected: torch.Tensor, dtype: str) -> bool:
    return bool((found - expected).abs().max() <= TOLERANCE[dtype])
