"""SGLang server subprocess: in its own Python, on a free port, ended with this process."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from miles_dmd.engines.sglang.families import served
from miles_dmd.engines.sglang.schedule import scheduler_directory
from miles_dmd.errors import EngineError

logger = logging.getLogger(__name__)

POLL, GRACE = 0.5, 10.0
"""Seconds between two looks at a server that starts, and before one that does not end is killed."""
LOOPBACK = "127.0.0.1"
FOREIGN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Variables that would show the server's Python our packages."""


class ManagedServer:
    """Runs until ``close``, or until this process ends, however that ends: the server reads a pipe from here."""

    def __init__(self, command: list[str], url: str, log: Path, env: Mapping[str, str], start_timeout: float) -> None:
        self.url, self.log, self.start_timeout = url, log, start_timeout
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            output.write(f"{shlex.join(command)}\n".encode())
            output.flush()
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=dict(env), start_new_session=True
            )
        self._serves = False
        self._watcher = threading.Thread(target=self._watch, name="watch the server", daemon=True)
        self._watcher.start()

    def wait(self) -> None:
        limit = time.monotonic() + self.start_timeout
        while time.monotonic() < limit:
            if self.process.poll() is not None:
                raise EngineError(f"the SGLang server ended with status {self.process.returncode}: {self.last_words()}")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=5.0, trust_env=False).status_code == 200:
                    self._serves = True
                    return
            time.sleep(POLL)
        raise EngineError(
            f"the SGLang server at {self.url} did not answer within --sglang-start-timeout {self.start_timeout:g} s: "
            f"{self.last_words()}"
        )

    def last_words(self) -> str:
        """The log's last line that says something, and where the rest is."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return f"{lines[-1][:300]} (log: {self.log})"

    def _watch(self) -> None:
        """Its workers end with it, so that they keep no memory; that it is dead is said at once."""
        status = self.process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        if self._serves:
            logger.warning("the SGLang server at %s ended with status %s: %s", self.url, status, self.last_words())

    def close(self) -> None:
        self._serves = False
        if self.process.stdin:
            self.process.stdin.close()
        self._watcher.join(GRACE)
        if self._watcher.is_alive():
            os.killpg(self.process.pid, signal.SIGKILL)
            self._watcher.join()


def serve(args: Any, *, device: str, number: int, host: str) -> ManagedServer:
    options = args.engine_options
    ports = free_ports(host, 3)
    folder = Path(options.sglang_log_dir or Path(args.cache_dir) / "sglang" / "logs")
    log = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-server{number}.log"
    address = host if ":" not in host else f"[{host}]"
    return ManagedServer(
        command(args, host=host, ports=ports),
        f"http://{address}:{ports[0]}",
        log,
        environment(args, device=device, host=host),
        options.sglang_start_timeout,
    )


def command(args: Any, *, host: str, ports: Sequence[int]) -> list[str]:
    """``ports``: for HTTP, and two of the server's own, which two servers that start together would both take."""
    port, scheduler, master = map(str, ports)
    options, family = args.engine_options, served(args.model_family)
    return [
        *(options.sglang_python, "-m", "miles_dmd_sglang.serve", "--die-with-stdin"),
        *("--model-path", str(Path(args.hf_checkpoint).resolve()), "--model-id", family.model_id),
        *("--component-paths.scheduler", str(scheduler_directory(args).resolve())),
        *("--host", host, "--port", port, "--scheduler-port", scheduler, "--master-port", master),
        *("--warmup-mode", "off", "--sleep-on-idle"),  # an idle server keeps a core busy otherwise
        *("--dit-precision", args.compute_dtype, "--vae-precision", "fp32"),
        *("--text-encoder-precisions", *[args.compute_dtype] * family.num_text_encoders),
        *shlex.split(options.sglang_args),
    ]


def environment(args: Any, *, device: str, host: str) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    env |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if host == LOOPBACK:
        env["GLOO_SOCKET_IFNAME"] = "lo"
    if device == "cpu":
        env |= {"OMP_NUM_THREADS": str(args.cpu_threads), "MKL_NUM_THREADS": str(args.cpu_threads)}
    return env


def free_ports(host: str, count: int) -> list[int]:
    """Different ones: all are held until the last is found."""
    with contextlib.ExitStack() as stack:
        kind = socket.AF_INET6 if ":" in host else socket.AF_INET
        probes = [stack.enter_context(socket.socket(kind)) for _ in range(count)]
        for probe in probes:
            probe.bind((host, 0))
        return [int(probe.getsockname()[1]) for probe in probes]
