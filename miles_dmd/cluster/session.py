"""Ray itself: joined or started, watched, and left again. Nothing of this machine is reachable from outside it."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from miles_dmd.cluster.guardian import Guardian
from miles_dmd.errors import ClusterError

# Read by Ray when it is imported. A local cluster listens on loopback only, so its token file would protect nothing.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
# Without it Ray replaces 127.0.0.1 by an address that others can reach, and listens on all; named after the two systems
# on which Ray does so by itself. It concerns clusters that are started here, not those that are joined.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
# Ray's default of 60 s is how long its agents and this driver would hang on to a cluster whose head is gone.
os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "15")

import ray

LONGEST_TEMP = 20
"""Of a socket's path, 107 characters at most, Ray's own part takes the rest."""


class Session:
    """A cluster that this process speaks to. ``died`` tells what of Ray itself is gone, or nothing: ""."""

    def __init__(self, address: str | None, processes: dict[int, str] | None = None) -> None:
        self.address, self.processes = address, processes or {}

    def died(self) -> str:
        if self.address is None:
            gone = [name for pid, name in self.processes.items() if not _lives(pid)]
            return f"Ray's {' and '.join(gone)} on this machine died" if gone else ""
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except OSError as error:
            return f"the Ray cluster at {self.address} does not answer any more ({error})"
        return ""


@contextlib.contextmanager
def ray_session(address: str | None) -> Iterator[Session]:
    """Join the cluster at ``address``, or start one on this machine; leave it, or stop it, at the end.

    A process that already speaks to a cluster (a notebook, a test) keeps it.
    """
    if ray.is_initialized():
        yield Session(ray.get_runtime_context().gcs_address)
    elif address is not None:
        _join(address)
        try:
            yield Session(ray.get_runtime_context().gcs_address)
        finally:
            ray.shutdown()
    else:
        with _local_cluster() as session:
            yield session


@contextlib.contextmanager
def _local_cluster() -> Iterator[Session]:
    """In a directory of its own, so that runs on one machine share nothing; both are gone at the end."""
    root = None if len(tempfile.gettempdir()) <= LONGEST_TEMP else "/tmp"
    directory = Path(tempfile.mkdtemp(prefix="mdmd-", dir=root))
    guardian = Guardian(directory)
    session = Session(None)
    try:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        quiet = {"log_to_driver": False, "logging_level": "ERROR"}
        ray.init(address="local", include_dashboard=False, _temp_dir=str(directory), **quiet)
        session.processes = _servers()
        yield session
    finally:
        if session.died():
            guardian.finish()  # first: leaving a cluster takes a minute when nobody answers
            ray.shutdown()
        else:
            ray.shutdown()
            guardian.finish()


def _servers() -> dict[int, str]:
    """Process id -> name of the two without which nothing works, children of this process."""
    found = {}
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in map(int, children.read_text().split()):
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            if name in ("gcs_server", "raylet"):
                found[pid] = name
    return found


def _lives(pid: int) -> bool:
    """Whether it runs: a dead child that nobody has waited for is still listed, as a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _join(address: str) -> None:
    _knock(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ClusterError(_nobody(address, str(error).splitlines()[0])) from error


def _knock(address: str) -> None:
    """Ray itself waits for minutes before it says that nobody is there."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise ClusterError(_nobody(address, str(error))) from error


def _nobody(address: str, reason: str) -> str:
    return (
        f"--ray-address {address}: no Ray cluster answers there ({reason}); start one with `ray start --head`, or "
        "leave the flag out to start one on this machine"
    )


def every(seconds: float, question: Callable[[], str]) -> Callable[[], str]:
    """``question``, asked at most so often; in between, the last answer."""
    answer, due = "", 0.0

    def asked() -> str:
        nonlocal answer, due
        if time.monotonic() >= due:
            answer, due = question(), time.monotonic() + seconds
        return answer

    return asked
