"""Command line of a language-model server that the run starts."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from miles_dmd.client import Client, Patience
from miles_dmd.engines.sglang.language.fleet import PRECISIONS, require_usable
from miles_dmd.engines.sglang.launch import ManagedServer, Ports, start
from miles_dmd.engines.sglang.preflight import look
from miles_dmd.engines.sglang.server_flags import LANGUAGE, words
from miles_dmd.modalities.language.options import language_options

if TYPE_CHECKING:
    from miles_dmd.config.args import Args
    from miles_dmd.contracts.engine import Preflight, StartServer
    from miles_dmd.engines.sglang import Options

SPARE = 16
"""Tokens of a request that sglang keeps for itself; it wants 6."""
ON_CPU = (
    *("--device", "cpu", "--attention-backend", "torch_native"),
    *("--disable-overlap-schedule", "--disable-cuda-graph"),
)


def serve(args: Args, *, device: str, number: int, host: str) -> ManagedServer:
    make = functools.partial(
        command, args.engine_options, args.pipeline_directory, args.compute_dtype, device, longest(args), host
    )
    return start(args, make, device=device, number=number, host=host)


def longest(args: Args) -> int:
    """Tokens of the longest prompt with its response."""
    own = language_options(args)
    return own.max_prompt_tokens + own.max_new_tokens


def preflight(args: Args) -> str:
    """See ``miles_dmd.engines.sglang.preflight``; of a server of language models."""

    def release(client: Client, patience: Patience) -> str:
        info, model = (client.get(path, patience=patience) for path in ("/server_info", "/model_info"))
        require_usable(client.url, info, model, args.compute_dtype, longest(args))
        return str(info.get("version"))

    return look(args, release, "weights and samples are compared when the run starts")


def command(
    options: Options, directory: Path, dtype: str, device: str, longest: int, host: str, ports: Ports, name: str
) -> list[str]:
    tokens = options.sglang_concurrency * (longest + SPARE)  # of the cache; on a CPU, sglang would take most of it
    on_cpu = (*ON_CPU, "--max-total-tokens", str(tokens), "--max-running-requests", str(options.sglang_concurrency))
    return [
        *(str(options.sglang_python), "-m", "miles_dmd_sglang.serve_language", "--die-with-stdin"),
        *("--model-path", str(directory.resolve()), "--served-model-name", name),
        *("--host", host, "--port", str(ports.http), "--nccl-port", str(ports.master)),
        *("--dtype", PRECISIONS[dtype]),
        # texts are none of the server's business: ids go in, and ids come out
        *("--skip-tokenizer-init", "--grammar-backend", "none", "--skip-server-warmup"),
        "--sleep-on-idle",  # an idle server keeps a core busy otherwise
        *("--sampling-backend", "pytorch"),  # others refuse seeds
        # without it, a server that sleeps keeps its memory
        *(on_cpu if device == "cpu" else ("--enable-memory-saver",)),
        *words(options.sglang_args, LANGUAGE),
    ]


if TYPE_CHECKING:  # mypy compares what the engine type names as text
    _serve: StartServer = serve
    _preflight: Preflight = preflight
