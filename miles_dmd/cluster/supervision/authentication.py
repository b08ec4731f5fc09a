"""Ray's token authentication: a token of the run's own for a cluster that it starts, the user's for one that it joins.

A process reads its mode and token from the environment once, and hands both on to what it starts. What Ray 2.60 reads,
in this order: RAY_AUTH_TOKEN, the file that RAY_AUTH_TOKEN_PATH names, ~/.ray/auth_token; an empty one is none.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import ray

from miles_dmd.errors import ClusterError, ConfigError

AuthMode = Literal["token", "disabled"]
TOKEN_FILE = "auth_token"
PROBE = Path(__file__).with_name("auth_probe.py")


@contextlib.contextmanager
def own_authentication(mode: AuthMode, directory: Path) -> Iterator[None]:
    """Let what this process starts within the block authenticate by a fresh token in ``directory``, or not at all."""
    if mode == "disabled":
        with authenticating(mode):
            yield
        return
    if not _is_built_in():
        raise ConfigError(
            f"--ray-auth-mode token: Ray {ray.__version__} has no token authentication; install Ray 2.56 or later, or "
            "pass --ray-auth-mode disabled: then every user of this machine can run code as you while the run lasts"
        )
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": None, "RAY_AUTH_TOKEN_PATH": str(_write_token(directory))}
    with _environment({**own, "RAY_ENABLE_K8S_TOKEN_AUTH": None}):
        yield


def _write_token(directory: Path) -> Path:
    path = directory / TOKEN_FILE
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(secrets.token_hex(32))
    return path


def mode_of(address: str, timeout: float) -> AuthMode:
    """Authentication mode of the cluster at ``address``. Raises ConfigError where it wants a token and the right one is
    not here, ClusterError where there is no cluster, which names no flag.

    Not by trial and error in this process: Ray's core prints a warning of its own for each refusal, and ends the
    process where the mode asks for a token that is not there.
    """
    command = [sys.executable, str(PROBE), address, str(math.ceil(timeout) + 1)]
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=timeout)
        answer = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired as error:
        raise ClusterError(
            f"no answer from Ray within {timeout:g} s; --placement-timeout {timeout:g} is the limit"
        ) from error
    except (ValueError, IndexError) as error:
        raise ClusterError("it does not say whether it wants a token") from error
    if "unreachable" in answer:
        raise ClusterError(answer["unreachable"])
    if "refused" in answer:
        raise ConfigError(f"--ray-address {address}: that Ray cluster wants a token, and {answer['refused']}")
    mode: AuthMode = answer["mode"]
    return mode


@contextlib.contextmanager
def authenticating(mode: AuthMode) -> Iterator[None]:
    """Speak to a cluster of that mode within the block, with the user's token if any."""
    with _environment({"RAY_AUTH_MODE": mode}):
        yield


@contextlib.contextmanager
def _environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set these variables of Ray's within the block, None for none."""
    before = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    if _is_built_in():  # this process has read them already
        ray._raylet.Config.initialize("")
        ray._raylet.AuthenticationTokenLoader.instance().reset_cache()


def _is_built_in() -> bool:
    return hasattr(ray._raylet, "AuthenticationTokenLoader")
