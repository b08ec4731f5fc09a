"""Preflight of servers, or of the environment that starts some, before anything loads.
Knows no torch."""

from __future__ import annotations

import os
import subprocess
from typing import Any

from miles_dmd.engines.sglang.client import SHOWN, Client
from miles_dmd.engines.sglang.families import served
from miles_dmd.engines.sglang.identity import MINIMUM, identify, numbers
from miles_dmd.engines.sglang.launch import FOREIGN
from miles_dmd.errors import ConfigError, EngineError

VERSIONS = "from importlib.metadata import version; print(version('miles-dmd-sglang'), version('sglang'))"
SECONDS = 60.0
"""For a Python to start and say what it has."""


def knock(args: Any) -> None:
    options = args.engine_options
    if args.ray_address:
        return  # addresses and paths are those of the rollout worker's node, which may be another one
    for url in options.sglang_url:
        _require_server(url, args)
    if not options.sglang_url:
        _require_environment(options.sglang_python)


def _require_server(url: str, args: Any) -> None:
    options = args.engine_options
    client = Client(url, timeout=options.sglang_probe_timeout, deadline=options.sglang_deadline, connections=1)
    try:
        client.get("/health")
        identify(client, served(args.model_family).pipeline)
    except EngineError as error:
        raise ConfigError(f"--sglang-url {url}: no SGLang server that can be used answers there ({error})") from error
    finally:
        client.close()


def _require_environment(python: str) -> None:
    env = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    command = [python, "-c", VERSIONS]
    try:
        asked = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace",
            timeout=SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"--sglang-python {python} cannot be run ({error}); {CURE}") from error
    if asked.returncode:
        said = (asked.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise ConfigError(f"--sglang-python {python} has no sglang with our plugin ({said[:SHOWN]}); {CURE}")
    version = (asked.stdout.split() or [""])[-1]
    if not version:
        raise ConfigError(f"--sglang-python {python} says nothing that names its sglang; {CURE}")
    if numbers(version) < MINIMUM:
        wanted = ".".join(map(str, MINIMUM))
        raise ConfigError(f"--sglang-python {python} has sglang {version}; install {wanted} or later there")


CURE = "scripts/setup_sglang_cpu.sh makes an environment, and docs/sglang.md says how on a GPU host"
