"""Preflight of servers, or of the Python that starts them: release, plugin, pipeline. Knows no torch."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from miles_dmd import registry
from miles_dmd.client import HEALTH_TIMEOUT, SHOWN, Client, Patience
from miles_dmd.engines.sglang.families import served
from miles_dmd.engines.sglang.launch import own_environment
from miles_dmd.errors import ConfigError, EngineError, EngineRefused

if TYPE_CHECKING:
    from miles_dmd.config.args import Args
    from miles_dmd.contracts.engine import Preflight
    from miles_dmd.engines.sglang import Options

MINIMUM = (0, 5, 22)
"""The first release whose SD3 scheduler can be given the few-step grid (use_uniform_sigmas)."""
VERSIONS = "from importlib.metadata import version; print(version('miles-dmd-sglang'), version('sglang'))"
PYTHON_TIMEOUT = 60.0
"""Seconds for a Python to start and print its versions."""
CURE = "scripts/setup_sglang_cpu.sh makes an environment, and docs/sglang.md says how on a GPU host"
ASKED = {
    "diffusion": (
        "miles_dmd.engines.sglang.preflight:release",
        "weights, encoders, grid and samples are compared when the run starts",
    ),
    "language": (
        "miles_dmd.engines.sglang.language.launch:release",
        "weights and samples are compared when the run starts",
    ),
}
"""Modality -> (dotted name of a ``Release``, what is looked at later)."""
Release = Callable[["Args", Client, Patience], str]
"""Asks a server for its release. Raises EngineError for one that the run cannot use."""


class Identity(NamedTuple):
    version: str
    tp_size: int
    """Devices over which its network is sharded."""


def preflight(args: Args) -> str:
    """Refuse what the run could not use before anything loads; a line on what was found. Raises ConfigError."""
    options: Options = args.engine_options
    dotted, later = ASKED[registry.load("losses", args.loss_type).modality]
    release: Release = registry.resolve(dotted)
    if args.ray_address:
        return "SGLang: nothing was asked, because servers and Python are those of the rollout worker's node; " + later
    if not options.sglang_url:
        return f"SGLang: --sglang-python {options.sglang_python} has {_python_versions(options.sglang_python)}; {later}"
    found = [f"{url} runs SGLang {_server_release(url, args, release)}" for url in options.sglang_url]
    return f"SGLang: {', '.join(found)}; {later}"


def identify(client: Client, pipeline: str, *, patience: Patience | None = None) -> Identity:
    """Raises EngineRefused for another release or pipeline than the run can use, with the reason."""
    server = client.get("/server_info", patience=patience)
    version = str(server.get("version", ""))
    if not version or numbers(version) < MINIMUM:
        raise EngineRefused(f"{client.url} runs SGLang {version or 'of unknown version'}; install {WANTED}")
    served = client.get("/model_info", patience=patience).get("architectures") or ["nothing known"]
    if served != [pipeline]:
        raise EngineRefused(f"{client.url} serves {served[0]}; the run wants {pipeline}: serve --hf-checkpoint there")
    size = server.get("tp_size")
    return Identity(version, size if isinstance(size, int) else 1)


def numbers(version: str) -> tuple[int, ...]:
    """``0.5.23.post1`` -> (0, 5, 23)."""
    parts = version.split("+")[0].split(".")[:3]
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in parts)


WANTED = f"{'.'.join(map(str, MINIMUM))} or later"


def release(args: Args, client: Client, patience: Patience) -> str:
    return identify(client, served(args.model_family).pipeline, patience=patience).version


def _server_release(url: str, args: Args, release: Release) -> str:
    options: Options = args.engine_options
    patience = Patience(options.sglang_probe_timeout, options.sglang_deadline, "--sglang-probe-timeout")
    if args.dry_run:  # which answers at once, and waits for no server that is being started
        patience = Patience(HEALTH_TIMEOUT, 0.0, "")
    client = Client(url, timeout=patience.timeout, deadline=patience.deadline, connections=1)
    try:
        client.require_health(patience=patience)
        return release(args, client, patience)
    except EngineError as error:
        raise ConfigError(f"--sglang-url {url}: no SGLang server that can be used answers there ({error})") from error
    finally:
        client.close()


def _python_versions(python: str | None) -> str:
    try:
        asked = subprocess.run(
            [str(python), "-c", VERSIONS], env=own_environment(), stdin=subprocess.DEVNULL, capture_output=True,
            encoding="utf-8", errors="replace", timeout=PYTHON_TIMEOUT, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"--sglang-python {python} cannot be run ({error}); {CURE}") from error
    if asked.returncode:
        said = (asked.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise ConfigError(f"--sglang-python {python} has no sglang with our plugin ({said[:SHOWN]}); {CURE}")
    plugin, version = (["", "", *asked.stdout.split()])[-2:]
    if not version:
        raise ConfigError(f"--sglang-python {python} says nothing that names its sglang; {CURE}")
    if numbers(version) < MINIMUM:
        raise ConfigError(f"--sglang-python {python} has sglang {version}; install {WANTED} there")
    return f"sglang {version} and plugin {plugin}"


if TYPE_CHECKING:
    _: Preflight = preflight
