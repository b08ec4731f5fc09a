"""Identity of a server: release of SGLang and pipeline served. Knows no torch."""

from __future__ import annotations

from typing import NamedTuple

from miles_dmd.engines.sglang.client import Client, Patience
from miles_dmd.errors import EngineRefused

MINIMUM = (0, 5, 22)
"""The first release whose SD3 scheduler can be given the few-step grid (use_uniform_sigmas)."""


class Identity(NamedTuple):
    version: str
    tp_size: int
    """Devices over which its network is sharded."""


def identify(client: Client, pipeline: str, *, patience: Patience | None = None) -> Identity:
    """Raises EngineRefused for another release or pipeline than the run can use, with the reason."""
    server = client.get("/server_info", patience=patience)
    version = str(server.get("version", ""))
    if not version or numbers(version) < MINIMUM:
        wanted = ".".join(map(str, MINIMUM))
        raise EngineRefused(f"{client.url} runs SGLang {version or 'of unknown version'}; install {wanted} or later")
    served = client.get("/model_info", patience=patience).get("architectures") or ["nothing known"]
    if served != [pipeline]:
        raise EngineRefused(f"{client.url} serves {served[0]}; the run wants {pipeline}: serve --hf-checkpoint there")
    size = server.get("tp_size")
    return Identity(version, size if isinstance(size, int) else 1)


def numbers(version: str) -> tuple[int, ...]:
    parts = version.split("+")[0].split(".")[:3]
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in parts)
