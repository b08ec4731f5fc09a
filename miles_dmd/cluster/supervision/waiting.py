"""Waiting for calls of actors: the first failure is raised at once, with role and rank, while others may hang."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayError, RayTaskError

from miles_dmd.cluster.supervision.watched import END, Record
from miles_dmd.errors import ClusterError, MilesDmdError, Unanswered

TICK = 2.0
"""Seconds between two looks at Ray itself."""
GRACE = 2.0
"""Seconds in which a death is heard of that may have made another rank raise."""
LAST_RECORDS_SECONDS = 5.0
"""Limit of the wait for what processes have logged before something failed."""
STACKS_SECONDS = 20.0
"""Limit of the wait for the stack traces of late processes."""


class Supervisor:
    """Waits for calls, and looks after every process of the run meanwhile: whoever dies ends the wait.

    ``died`` returns the part of Ray that is gone, or "". A call that takes longer than ``timeout`` seconds is given up,
    and a process that has not started within ``start_timeout``; ``raylet_stderr`` may say why.
    """

    def __init__(
        self,
        timeout: float,
        died: Callable[[], str] = lambda: "",
        *,
        start_timeout: float = 120.0,
        raylet_stderr: Callable[[], str] = lambda: "",
    ) -> None:
        self.timeout, self.died, self.start_timeout, self.raylet_stderr = timeout, died, start_timeout, raylet_stderr
        self.sentinels: dict[ray.ObjectRef, str] = {}
        self._actors: dict[str, Any] = {}

    def watch(self, who: str, actor: Any) -> None:
        """``actor``, a Watched one, belongs to the run from now on."""
        self._actors[who] = actor
        self._listen(who)

    def await_start(self) -> None:
        """Wait until every process is there: Ray retries one that it cannot start for ever, and tells nobody."""
        calls = {who: actor.started.remote() for who, actor in self._actors.items()}
        try:
            self._gather(calls, "starting", self.start_timeout)
        except NoAnswer as error:
            why = f"; Ray says: {said}" if (said := self.raylet_stderr()) else ""
            raise ClusterError(f"{error}; --placement-timeout {self.start_timeout:g} is the limit{why}") from error

    def _gather(
        self,
        calls: Mapping[str, ray.ObjectRef],
        doing: str,
        timeout: float,
        count: Callable[[int], None] = lambda done: None,
    ) -> list[Any]:
        return gather(
            calls, doing, timeout=timeout, sentinels=self.sentinels, relay=self._relay, died=self.died, count=count
        )

    def gather(
        self, calls: Mapping[str, ray.ObjectRef], doing: str, count: Callable[[int], None] = lambda done: None
    ) -> list[Any]:
        """Results of ``calls`` in order; ``count`` is called with the number of those that are done."""
        try:
            return self._gather(calls, doing, self.timeout, count)
        except NoAnswer as error:
            raise Unanswered(f"{error}; --remote-timeout {self.timeout:g} is the limit") from self._stacks(error.late)
        except MilesDmdError:
            self._relay_last_records()
            raise

    def _relay(self, ref: ray.ObjectRef) -> None:
        """Log what an actor has logged, and listen to it again, unless it is dead."""
        who = self.sentinels.pop(ref)
        records: list[Record] = ray.get(ref)
        for name, level, message in records:
            if name:
                logging.getLogger(name).log(level, "%s: %s", who, message)
        if END not in records:
            self._listen(who)

    def _listen(self, who: str) -> None:
        self.sentinels[self._actors[who].next_log_records.remote()] = who

    def _relay_last_records(self) -> None:
        """Log what was logged just before a failure: it may tell why."""
        if self.died():
            return
        living = set(self.sentinels.values())
        for who in living:
            self._actors[who].end_log.remote()
        limit = time.monotonic() + LAST_RECORDS_SECONDS
        while self.sentinels and (left := limit - time.monotonic()) > 0:
            for ref in ray.wait(list(self.sentinels), timeout=left)[0]:
                who = self.sentinels[ref]
                try:
                    self._relay(ref)
                except RayError:  # dead ones have nothing to say
                    living.discard(who)
        for who in living - set(self.sentinels.values()):
            self._listen(who)

    def fetch(self, ref: ray.ObjectRef, who: str, doing: str) -> Any:
        return self.gather({who: ref}, doing)[0]

    def _stacks(self, late: Sequence[str]) -> ClusterError:
        """Stack traces of those who do not answer, for ours."""
        asked = {who: self._actors[who].stacks.remote() for who in late if who in self._actors}
        done, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=STACKS_SECONDS) if asked else ([], [])
        shown = [f"{who} is at\n{ray.get(ref, timeout=5)}" for who, ref in asked.items() if ref in done]
        return ClusterError("\n".join(shown) or "nobody tells where they are")


class NoAnswer(ClusterError):
    """``late`` did not answer in time."""

    def __init__(self, late: Sequence[str], message: str) -> None:
        super().__init__(message)
        self.late = late


def gather(
    calls: Mapping[str, ray.ObjectRef],
    doing: str,
    *,
    timeout: float | None = None,
    sentinels: Mapping[ray.ObjectRef, str] | None = None,
    relay: Callable[[ray.ObjectRef], None] = lambda ref: None,
    died: Callable[[], str] = lambda: "",
    count: Callable[[int], None] = lambda done: None,
) -> list[Any]:
    """Results of ``calls`` (who -> reference) in order.

    A rank that raises in the middle of a collective leaves its siblings waiting in it, so whichever finishes first is
    looked at first. ``sentinels`` (reference -> who) finish when their process dies, or logs something: ``relay`` takes
    that, and puts another one in the place of that one. Who is waited for and logs something works, so ``timeout``
    begins anew: encoding may take hours, and logs how far it is. Errors of ours pass through; a dead process, Ray's own
    end or another error becomes a ClusterError.
    """
    who_of, watched = {ref: who for who, ref in calls.items()}, sentinels or {}
    waiting = list(who_of)
    limit = None if timeout is None else time.monotonic() + timeout
    while waiting:
        left = TICK if limit is None else min(TICK, max(limit - time.monotonic(), 0.0))
        done, _ = ray.wait([*waiting, *watched], num_returns=1, timeout=left, fetch_local=False)
        if gone := died():
            raise ClusterError(f"{gone} while {doing}")
        for ref in done:
            _look(ref, who_of.get(ref) or watched[ref], doing, watched, timeout)
            if ref in watched:
                if timeout is not None and watched[ref] in {who_of[other] for other in waiting}:
                    limit = time.monotonic() + timeout
                relay(ref)
        waiting = [ref for ref in waiting if ref not in done]
        count(len(calls) - len(waiting))
        if waiting and limit is not None and time.monotonic() >= limit:
            late = [who_of[ref] for ref in waiting]
            raise NoAnswer(late, f"no answer from {', '.join(late)} within {timeout:.0f} s while {doing}")
    return [_get(ref, who, doing, timeout) for who, ref in calls.items()]


def _get(ref: ray.ObjectRef, who: str, doing: str, timeout: float | None) -> Any:
    """Result of a call that has ended; it may lie on another node."""
    try:
        return ray.get(ref, timeout=timeout)
    except GetTimeoutError as error:
        raise NoAnswer([who], f"the answer of {who} did not arrive within {timeout:.0f} s while {doing}") from error


def _look(
    ref: ray.ObjectRef, who: str, doing: str, watched: Mapping[ray.ObjectRef, str], timeout: float | None
) -> None:
    """Raise what ``ref`` holds if it is an error; the death of another, if that is why."""
    try:
        _get(ref, who, doing, timeout)
    except RayActorError as error:
        raise ClusterError(f"the process of {who}{_where(error)} died while {doing}{_why(error)}") from error
    except (RayTaskError, ObjectLostError) as error:
        cause = getattr(error, "cause", None) or error
        if isinstance(cause, MilesDmdError):
            raise cause from error
        _look_for_the_dead(watched, doing, timeout)
        raise ClusterError(f"{who} failed while {doing}: {type(cause).__name__}: {_first_line(cause)}") from error


def _look_for_the_dead(watched: Mapping[ray.ObjectRef, str], doing: str, timeout: float | None) -> None:
    limit, refs = time.monotonic() + GRACE, dict(watched)
    while refs and (left := limit - time.monotonic()) > 0:
        for ref in ray.wait(list(refs), timeout=left)[0]:
            _look(ref, refs.pop(ref), doing, {}, timeout)  # returns for one that lives, and only said something


def _where(error: RayActorError) -> str:
    found = re.search(r"pid: (\d+)", str(error))
    return f" (pid {found[1]})" if found else ""


def _why(error: RayActorError) -> str:
    """Ray's paragraph in a few words; the whole stands in the traceback."""
    known = {"running low on memory": ": the node ran out of memory", "its node has died": ": its node died"}
    return next((short for long, short in known.items() if long in str(error)), "")


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "")
