"""Authentication probe of a Ray cluster, in a process of its own: the token that it wants, if it wants one.

``python auth_probe.py ADDRESS SECONDS`` prints one of {"mode": "disabled"}, {"mode": "token"}, {"refused": why the
token is not right}, {"unreachable": why}, as JSON. It imports nothing of ours.
"""

from __future__ import annotations

import json
import os
import signal
import sys

NO_TOKEN = "InvalidAuthToken"
"""Answer of Ray's servers to a call with a wrong token, or without one."""


def probe(address: str) -> dict[str, str]:
    wanted = os.environ.pop("RAY_AUTH_MODE", "token")  # read when Ray is imported; without a token first
    import ray
    from ray._private.services import canonicalize_bootstrap_address

    try:
        found = canonicalize_bootstrap_address(address)
    except (ConnectionError, ValueError) as error:
        return {"unreachable": first_line(error)}
    if found is None:
        return {"unreachable": "no cluster was found on this machine"}
    if not (refusal := refused(found)):
        return {"mode": "disabled"}
    if NO_TOKEN not in refusal:
        return {"unreachable": refusal}
    if not hasattr(ray._raylet, "AuthenticationTokenLoader"):
        return {"refused": f"Ray {ray.__version__} here knows none; install the version of the cluster"}
    if wanted.lower() != "token":
        return {"refused": f"RAY_AUTH_MODE={wanted} keeps this run from showing one; unset it"}
    return with_token(found)


def with_token(address: str) -> dict[str, str]:
    """Answer of the cluster to the token that Ray finds here."""
    import ray

    try:
        here = ray._raylet.AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True)
    except ray.exceptions.AuthenticationError as error:
        return {"refused": f"{error.message}; {CURE}"}
    if not here:
        return {"refused": f"there is none here; {CURE}"}
    os.environ["RAY_AUTH_MODE"] = "token"  # not before: Ray would end this process where there is none
    ray._raylet.Config.initialize("")
    if not (refusal := refused(address)):
        return {"mode": "token"}
    if NO_TOKEN in refusal:
        return {"refused": f"the one {source()} is another one; {CURE}"}
    return {"unreachable": refusal}


CURE = (
    "put what `ray get-auth-token` prints on the cluster's head into ~/.ray/auth_token, into a file that "
    "RAY_AUTH_TOKEN_PATH names, or into RAY_AUTH_TOKEN"
)


def source() -> str:
    """The place where Ray finds the token first."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "in RAY_AUTH_TOKEN"
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return f"in {path} (RAY_AUTH_TOKEN_PATH)" if path else "in ~/.ray/auth_token"


def refused(address: str) -> str:
    """Reason for which the cluster refuses this process; "" where it does not."""
    import ray

    try:
        ray._raylet.GcsClient(address=address)
    except Exception as error:  # noqa: BLE001 - what it raises has changed from version to version
        return first_line(error)
    return ""


def first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


if __name__ == "__main__":
    signal.alarm(int(sys.argv[2]))  # ends this process, also where the one that started it is gone
    print(json.dumps(probe(sys.argv[1])))
