"""Ray itself: joined or started, and left again. Nothing of this machine is reachable from outside it."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

from miles_dmd.errors import ClusterError

# Read by Ray when it is imported. A local cluster listens on loopback only, so its token file would protect nothing.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray


@contextlib.contextmanager
def ray_session(address: str | None) -> Iterator[None]:
    """Join the cluster at ``address``, or start one on this machine; leave it, or stop it, at the end.

    A process that already speaks to a cluster (a notebook, a test) keeps it.
    """
    if ray.is_initialized():
        yield
        return
    _start(address)
    try:
        yield
    finally:
        ray.shutdown()


def _start(address: str | None) -> None:
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        ray.init(address="local", include_dashboard=False, _node_ip_address="127.0.0.1", **quiet)
        return
    _knock(address)
    try:
        ray.init(address=address, **quiet)
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
