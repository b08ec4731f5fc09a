"""SGLang server subprocess: in its own Python, on a free port, ended with this process."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import httpx

from miles_dmd import registry
from miles_dmd.engines.sglang.families import scheduler_directory, served
from miles_dmd.engines.sglang.server_flags import words
from miles_dmd.errors import EngineError

if TYPE_CHECKING:
    from miles_dmd.config.args import Args
    from miles_dmd.contracts.engine import StartServer
    from miles_dmd.engines.sglang import Options

logger = logging.getLogger(__name__)

POLL, GRACE = 0.5, 10.0
"""Seconds between two looks at a server that starts, and before one that does not end is killed."""
ATTEMPTS = 100
LOOPBACK = "127.0.0.1"
FOREIGN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
PORT_TAKEN = ("unavailable and --strict-ports", "address already in use")
"""Last words of a server one of whose ports somebody else took before it did."""
HALF_DEAD = "offline request broker exited"
"""Said by one that has lost the port after that of HTTP, and lives on without ever being ready."""


class Ports(NamedTuple):
    http: int
    scheduler: int
    master: int


Command = Callable[[Ports, str], list[str]]


class ManagedServer:
    """Runs until ``close``, or until this process ends, however that ends: the server reads a pipe from here.

    ``command`` makes its command line of ports and of a name that only this start has: whoever answers by that name is
    this server, and no stranger who has taken its port.
    """

    def __init__(self, command: Command, host: str, log: Path, env: Mapping[str, str], start_timeout: float) -> None:
        self.command, self.host, self.log, self.start_timeout = command, host, log, start_timeout
        self.env = dict(env)
        log.parent.mkdir(parents=True, exist_ok=True)
        self._serves = False
        self._start("wb")

    def _start(self, mode: Literal["wb", "ab"]) -> None:
        ports, self.name = free_ports(self.host), f"miles-dmd-{secrets.token_hex(8)}"
        self.url = f"http://{self.host if ':' not in self.host else f'[{self.host}]'}:{ports.http}"
        words = self.command(ports, self.name)
        with self.log.open(mode) as output:
            output.write(os.fsencode(f"{shlex.join(words)}\n"))
            output.flush()
            self._begins = output.tell()
            self.process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=output, stderr=output, env=self.env, start_new_session=True
            )
        self._watcher = threading.Thread(target=self._watch, args=(self.process,), name="watch the server", daemon=True)
        self._watcher.start()

    def wait(self) -> str:
        """Wait until it answers; its address. It starts again on other ports where somebody else took one first."""
        limit = time.monotonic() + self.start_timeout
        while time.monotonic() < limit:
            if self._answers():
                self._serves = True
                return self.url
            if self._has_lost_a_port():
                logger.warning("a port of the SGLang server at %s was taken; it starts again on others", self.url)
                self._end()
                self._start("ab")
            elif (status := self.process.poll()) is not None:
                raise EngineError(f"the SGLang server ended with status {status}: {self.last_words()}")
            time.sleep(POLL)
        raise EngineError(
            f"the SGLang server at {self.url} did not answer within --sglang-start-timeout {self.start_timeout:g} s: "
            f"{self.last_words()}"
        )

    def _answers(self) -> bool:
        """Return whether it is ready, and no stranger at its port."""
        with contextlib.suppress(httpx.TransportError, ValueError), httpx.Client(timeout=5.0, trust_env=False) as http:
            if http.get(f"{self.url}/health").status_code == 200:
                found = http.get(f"{self.url}/server_info").json()
                return isinstance(found, dict) and found.get("served_model_name") == self.name
        return False

    def _has_lost_a_port(self) -> bool:
        dead = self.process.poll() is not None  # asked first: then its log is whole
        with self.log.open("rb") as file:
            file.seek(self._begins)
            said = file.read().decode(errors="replace").lower()
        return HALF_DEAD in said or (dead and any(reason in said for reason in PORT_TAKEN))

    def last_words(self) -> str:
        """The log's last line that says something, and where the rest is."""
        log = self.log.read_text(encoding="utf-8", errors="replace")
        lines = [line.strip() for line in log.splitlines() if line.strip()]
        return f"{lines[-1][:300]} (log: {self.log})"

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Its workers end with it, so that they keep no memory; that it is dead is said at once."""
        status = process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if self._serves:
            logger.warning("the SGLang server at %s ended with status %s: %s", self.url, status, self.last_words())

    def _end(self) -> None:
        if self.process.stdin:
            self.process.stdin.close()
        self._watcher.join(GRACE)
        if self._watcher.is_alive():
            os.killpg(self.process.pid, signal.SIGKILL)
            self._watcher.join()

    def close(self) -> None:
        self._serves = False
        self._end()


COMMANDS = {
    "diffusion": "miles_dmd.engines.sglang.launch:command",
    "language": "miles_dmd.engines.sglang.language.launch:command",
}
"""Modality -> dotted name of the function that makes a server's command line."""


def serve(args: Args, *, device: str, number: int, host: str) -> ManagedServer:
    options: Options = args.engine_options
    make: Callable[..., list[str]] = registry.resolve(COMMANDS[registry.load("losses", args.loss_type).modality])
    folder = Path(options.sglang_log_dir or Path(args.cache_dir) / "sglang" / "logs")
    log = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-server{number}.log"
    env = environment(args, device=device, host=host)
    return ManagedServer(functools.partial(make, args, device, host), host, log, env, options.sglang_start_timeout)


def command(args: Args, device: str, host: str, ports: Ports, name: str) -> list[str]:
    options: Options = args.engine_options
    family = served(args.model_family)
    return [
        *(str(options.sglang_python), "-m", "miles_dmd_sglang.serve", "--die-with-stdin"),
        *("--model-path", str(args.pipeline_directory.resolve()), "--model-id", family.model_id),
        *("--component-paths.scheduler", str(scheduler_directory(args).resolve())),
        # with a path of one component, sglang no longer looks whether all of them fit the device, and would stream T5
        # from the host for every sample
        *("--component-residency", "all=resident"),
        # without the first, it would listen somewhere else when a port is taken
        *("--strict-ports", "--served-model-name", name),
        *("--host", host, "--port", str(ports.http)),
        *("--scheduler-port", str(ports.scheduler), "--master-port", str(ports.master)),
        *("--warmup-mode", "off", "--sleep-on-idle"),  # an idle server keeps a core busy otherwise
        *("--dit-precision", args.compute_dtype, "--vae-precision", "fp32"),
        *("--text-encoder-precisions", *family.encoder_precisions(args.compute_dtype)),
        *words(options.sglang_args),
    ]


def own_environment() -> dict[str, str]:
    """Environment of this process without what would show a server's Python our packages."""
    return {name: value for name, value in os.environ.items() if name not in FOREIGN}


def environment(args: Args, *, device: str, host: str) -> dict[str, str]:
    env = {**own_environment(), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if host == LOOPBACK:
        env["GLOO_SOCKET_IFNAME"] = "lo"
    if device == "cpu":
        env |= {"OMP_NUM_THREADS": str(args.cpu_threads), "MKL_NUM_THREADS": str(args.cpu_threads)}
    return env


def free_ports(host: str) -> Ports:
    """Different ones: all are held until the last is found. The port after that of HTTP is free as well: sglang takes
    it for requests that come over no network, and has no flag for it."""
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as stack:

        def free(port: int = 0) -> int:
            probe = stack.enter_context(socket.socket(kind))
            probe.bind((host, port))
            return int(probe.getsockname()[1])

        for _ in range(ATTEMPTS):
            with contextlib.suppress(OSError, OverflowError):
                http = free()
                free(http + 1)
                return Ports(http, free(), free())
    raise EngineError(f"{host}: no two free ports beside each other were found in {ATTEMPTS} attempts")


if TYPE_CHECKING:  # mypy compares what the engine type names as text
    _serve: StartServer = serve
