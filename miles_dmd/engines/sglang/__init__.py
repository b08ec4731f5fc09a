"""SGLang rollout engine: servers that the run starts, or that are there already.

HTTP only; sglang is never imported here. It pins its own torch, so it lives in an environment of its own.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from miles_dmd import registry
from miles_dmd.config.values import Natural, OwnPath, Positive, Ranks, ReadPath, Threads
from miles_dmd.contracts.engine import EngineType
from miles_dmd.engines.sglang.families import served
from miles_dmd.engines.sglang.folders import sweep, weights_root
from miles_dmd.engines.sglang.server_flags import LANGUAGE, require_one_device, words
from miles_dmd.errors import ConfigError
from miles_dmd.modalities.diffusion.family import diffusion_family
from miles_dmd.sampling.strategies import FEW_STEP, ON_POLICY

if TYPE_CHECKING:
    from miles_dmd.config.args import Args


@dataclass(frozen=True, kw_only=True)
class Options:
    sglang_url: tuple[str, ...] = ()
    """Servers to attach to, such as http://127.0.0.1:30000; without any, the run starts its own."""
    sglang_python: ReadPath | None = None
    """Python of the environment that has sglang and our plugin, for servers that the run starts."""
    num_sglang_servers: Ranks = 1
    """Servers that the run starts."""
    sglang_host: Literal["loopback", "node"] = "loopback"
    """Address on which they listen: loopback, or, for several nodes, that of the node that each is on."""
    sglang_args: str = ""
    """Further flags of `sglang serve` for them, as one text: "--log-level debug"."""
    sglang_log_dir: OwnPath | None = None
    """Directory of their logs; by default sglang/logs in --cache-dir."""
    sglang_start_timeout: Positive = 600.0
    """Seconds until a server that the run starts must answer."""
    sglang_concurrency: Threads = 2
    """Requests under way at one server."""
    sglang_timeout: Positive = 600.0
    """Seconds to wait for one answer."""
    sglang_first_sample_timeout: Positive = 120.0
    """Seconds to wait for the first sample of a server that is admitted, in which it may compile and warm up."""
    sglang_probe_timeout: Positive = 60.0
    """Seconds to wait for a server to say how it is, to sleep or to wake; one that does not is evicted."""
    sglang_deadline: Positive = 60.0
    """Seconds over which any request that fails is repeated at a server, before it is evicted."""
    sglang_weights: Literal["auto", "tensor", "disk"] = "auto"
    """Transport of weights: in requests, or through a folder in --cache-dir; auto: requests for servers on a CPU."""
    verify_weights: Literal["first", "every", "off"] = "first"
    """Weight updates that are compared, tensor by tensor, with what the servers then hold."""
    verify_weights_interval: Natural = 1
    """With first: updates from one comparison of 16 tensors, others each time, to the next; 0 for none."""


def check(args: Args) -> None:
    _check_servers(args.engine_options)
    CHECKS[registry.load("losses", args.loss_type).modality](args)


def _check_diffusion(args: Args) -> None:
    options: Options = args.engine_options
    words(options.sglang_args)
    require_one_device(options.sglang_args, args.device)
    own = {trainer.role: trainer.overrides for trainer in args.trainers}.get("actor", {})
    family = diffusion_family(args)
    directory = Path(str(own.get("hf_checkpoint", args.hf_checkpoint)))  # the student's
    served(args.model_family).text_length(directory, family.text_length(args))


def _check_language(args: Args) -> None:
    options: Options = args.engine_options
    words(options.sglang_args, LANGUAGE)
    require_one_device(options.sglang_args, args.device, LANGUAGE)


CHECKS = {"diffusion": _check_diffusion, "language": _check_language}
"""Modality -> rules about servers of it."""


def _check_servers(options: Options) -> None:
    for url in options.sglang_url:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(f"--sglang-url {url} is no address; write it as http://HOST:PORT")
    if options.sglang_url:
        _refuse_for_attached(options)
    elif not options.sglang_python:
        raise ConfigError(
            "--rollout-engine sglang needs --sglang-python (of an environment that scripts/setup_sglang_cpu.sh or "
            "docs/sglang.md makes), or --sglang-url of a server that runs already"
        )
    elif not os.access(options.sglang_python, os.X_OK):
        raise ConfigError(
            f"--sglang-python {options.sglang_python}: there is no such program; scripts/setup_sglang_cpu.sh makes the "
            "environment"
        )


def _refuse_for_attached(options: Options) -> None:
    for flag, value, default in (
        ("--sglang-python", options.sglang_python, None),
        ("--num-sglang-servers", options.num_sglang_servers, 1),
        ("--sglang-host", options.sglang_host, "loopback"),
        ("--sglang-args", options.sglang_args, ""),
        ("--sglang-log-dir", options.sglang_log_dir, None),
        ("--sglang-start-timeout", options.sglang_start_timeout, Options.sglang_start_timeout),
    ):
        if value != default:
            raise ConfigError(
                f"{flag} {value} is for servers that the run starts, and --sglang-url names others; drop one"
            )


def num_servers(args: Args) -> int:
    options: Options = args.engine_options
    return 0 if options.sglang_url else options.num_sglang_servers


engine = EngineType(
    builds={
        "diffusion": "miles_dmd.engines.sglang.sampler:build",
        "language": "miles_dmd.engines.sglang.language.sampler:build",
    },
    rollouts={**FEW_STEP, **ON_POLICY},
    options=Options,
    check=check,
    serve="miles_dmd.engines.sglang.launch:serve",
    num_servers=num_servers,
    beyond_node=lambda args: args.engine_options.sglang_host == "node",
    tidy=lambda args: sweep(weights_root(args)),
    preflight="miles_dmd.engines.sglang.preflight:preflight",
)
