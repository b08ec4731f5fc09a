"""Command line of a language-model server that the run starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_dmd.client import Client, Patience
from miles_dmd.engines.sglang.language.fleet import PRECISIONS, require_usable
from miles_dmd.engines.sglang.server_flags import LANGUAGE, words
from miles_dmd.modalities.language.options import language_options

if TYPE_CHECKING:
    from miles_dmd.config.args import Args
    from miles_dmd.engines.sglang import Options
    from miles_dmd.engines.sglang.launch import Ports

SPARE = 16
"""Tokens of a request that sglang keeps for itself; it wants 6."""
ON_CPU = (
    *("--device", "cpu", "--attention-backend", "torch_native"),
    *("--disable-overlap-schedule", "--disable-cuda-graph"),
)


def longest(args: Args) -> int:
    """Tokens of the longest prompt with its response."""
    own = language_options(args)
    return own.max_prompt_tokens + own.max_new_tokens


def release(args: Args, client: Client, patience: Patience) -> str:
    """Release of a server, for the preflight. Raises EngineError for one that the run cannot use."""
    info, model = (client.get(path, patience=patience) for path in ("/server_info", "/model_info"))
    require_usable(client.url, info, model, args.compute_dtype, longest(args))
    return str(info.get("version"))


def command(args: Args, device: str, host: str, ports: Ports, name: str) -> list[str]:
    options: Options = args.engine_options
    tokens = options.sglang_concurrency * (longest(args) + SPARE)  # of the cache: sglang would take most of the memory
    on_cpu = (*ON_CPU, "--max-total-tokens", str(tokens), "--max-running-requests", str(options.sglang_concurrency))
    return [
        *(str(options.sglang_python), "-m", "miles_dmd_sglang.serve_language", "--die-with-stdin"),
        *("--model-path", str(args.pipeline_directory.resolve()), "--served-model-name", name),
        *("--host", host, "--port", str(ports.http), "--nccl-port", str(ports.master)),
        *("--dtype", PRECISIONS[args.compute_dtype]),
        # texts are none of the server's business: ids go in, and ids come out
        *("--skip-tokenizer-init", "--grammar-backend", "none", "--skip-server-warmup"),
        "--sleep-on-idle",  # an idle server keeps a core busy otherwise
        *("--sampling-backend", "pytorch"),  # others refuse seeds
        # without it, a server that sleeps keeps its memory
        *(on_cpu if device == "cpu" else ("--enable-memory-saver",)),
        *words(options.sglang_args, LANGUAGE),
    ]
