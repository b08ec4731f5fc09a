"""Waiting for actors: the first failure is told at once, with role and rank, also while another rank hangs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from miles_dmd.errors import ClusterError, MilesDmdError


def gather(calls: Mapping[str, ray.ObjectRef], doing: str, *, timeout: float | None = None) -> list[Any]:
    """Results of ``calls`` (who -> reference) in order.

    A rank that raises in the middle of a collective leaves its siblings waiting in it, so whichever finishes first is
    looked at first. Errors of ours pass through; a dead process or another error becomes a ClusterError.
    """
    who_of = {ref: who for who, ref in calls.items()}
    waiting = list(who_of)
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=1, timeout=timeout, fetch_local=False)
        if not done:
            late = ", ".join(who_of[ref] for ref in waiting)
            raise ClusterError(f"no answer from {late} within {timeout:.0f} s while {doing}")
        for ref in done:
            fetch(ref, who_of[ref], doing)
    return [ray.get(ref) for ref in calls.values()]


def fetch(ref: ray.ObjectRef, who: str, doing: str, *, timeout: float | None = None) -> Any:
    """The result of one call; see ``gather`` for the errors."""
    try:
        return ray.get(ref, timeout=timeout)
    except RayTaskError as error:
        cause = error.cause if isinstance(error.cause, BaseException) else error
        if isinstance(cause, MilesDmdError):
            raise cause from None
        raise ClusterError(f"{who} failed while {doing}: {type(cause).__name__}: {cause}") from error
    except GetTimeoutError:
        raise ClusterError(f"no answer from {who} within {timeout:.0f} s while {doing}") from None
    except RayActorError as error:
        reason = " ".join(str(error).split())
        raise ClusterError(f"the process of {who} died while {doing}: {reason}") from error


def names(group: str, count: int) -> Sequence[str]:
    """How errors call the ranks of a group."""
    return [f"{group} rank {rank}" for rank in range(count)]
