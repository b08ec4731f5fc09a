"""Servers of a run by its modality: SGLang has one program for diffusion models and one for language models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_dmd.engines.sglang import launch, of_language, preflight
from miles_dmd.engines.sglang.language import launch as language

if TYPE_CHECKING:
    from miles_dmd.config.args import Args
    from miles_dmd.contracts.engine import Preflight, Server, StartServer


def serve(args: Args, *, device: str, number: int, host: str) -> Server:
    """Start server ``number`` of the run, which listens at ``host``."""
    start = language.serve if of_language(args) else launch.serve
    return start(args, device=device, number=number, host=host)


def look(args: Args) -> str:
    """A line on the servers or the Python that the run names. Raises ConfigError where it could not start."""
    return language.preflight(args) if of_language(args) else preflight.preflight(args)


if TYPE_CHECKING:  # mypy compares what the engine type names as text
    _serve: StartServer = serve
    _look: Preflight = look
