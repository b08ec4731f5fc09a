"""Fleet of SGLang servers: load balancing, eviction, readmission, sleep and wake. What they serve is a subclass's."""

from __future__ import annotations

import contextlib
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from miles_dmd.client import HEALTH_TIMEOUT, Client, Patience, nobody_listens
from miles_dmd.errors import EngineError, EngineGone, EngineUnavailable

if TYPE_CHECKING:
    from miles_dmd.engines.sglang import Options

log = logging.getLogger(__name__)

SLEEP, WAKE = "/release_memory_occupation", "/resume_memory_occupation"
CHANGED = "it was restarted, or somebody else updates it"


@dataclass(eq=False)
class Member:
    client: Client
    version: int | None = None
    """Version of the weights that it holds."""
    evicted: str = ""
    """Reason of its eviction; empty while it is admitted."""
    compared: bool = False
    """True once weights that it was sent have been compared with what it holds."""
    slept: bool = False
    """True where the run has put it to sleep, and not woken it since."""
    outstanding: int = field(default=0, repr=False)


M = TypeVar("M", bound=Member)


def outcomes(members: Sequence[M], call: Callable[[M], object]) -> list[tuple[M, EngineError | None]]:
    """``call`` for all members at once, so that one that hangs delays no other: each with its failure, or None."""

    def tried(member: M) -> EngineError | None:
        try:
            call(member)
        except EngineError as error:
            return error
        return None

    if not members:
        return []
    with ThreadPoolExecutor(len(members)) as threads:
        return list(zip(members, threads.map(tried, members), strict=True))


class Fleet(ABC, Generic[M]):
    def __init__(self, clients: Sequence[Client], options: Options) -> None:
        """Raises EngineError that names the first server that cannot be used."""
        deadline = options.sglang_deadline
        self.patience = Patience(options.sglang_probe_timeout, deadline, "--sglang-probe-timeout")
        self.first_sample = Patience(options.sglang_first_sample_timeout, deadline, "--sglang-first-sample-timeout")
        self.impatience = Patience(min(HEALTH_TIMEOUT, self.patience.timeout), 0.0, "")
        self.attached = bool(options.sglang_url)
        self.asleep = False
        self._lock = threading.Lock()
        self.members: tuple[M, ...] = tuple(map(self._introduced, clients))

    # -- what is served ---------------------------------------------------------------------------------------------

    @abstractmethod
    def _introduced(self, client: Client) -> M:
        """A server that the run begins with. Raises EngineError for one that cannot be used, with the reason."""

    @abstractmethod
    def _renew(self, member: M) -> None:
        """Look at a server that is back as at the start; afterwards it is awake. Raises EngineError."""

    @abstractmethod
    def _require_same_samples(self, member: M) -> None:
        """Raises EngineError unless it samples now, and as before."""

    @abstractmethod
    def _require_unchanged(self, member: M) -> None:
        """Raises EngineError where it holds other weights than it was sent."""

    @abstractmethod
    def _settled(self, member: M, asleep: bool) -> None:
        """Put to sleep or wake, and require that it is, with the weights that it was sent."""

    @abstractmethod
    def _switch(self, member: M, asleep: bool, patience: Patience) -> object:
        """Put to sleep or wake."""

    # -- load balancing ---------------------------------------------------------------------------------------------

    @property
    def admitted(self) -> tuple[M, ...]:
        return tuple(member for member in self.members if not member.evicted)

    @property
    def evicted(self) -> tuple[M, ...]:
        return tuple(member for member in self.members if member.evicted)

    def require_one(self) -> None:
        """Raises EngineError where no server is admitted, with the reason of each eviction."""
        if not self.admitted:
            raise EngineError(f"no SGLang server is left: {'; '.join(member.evicted for member in self.members)}")

    @contextlib.contextmanager
    def taken(self) -> Iterator[M]:
        """The admitted server with the fewest requests under way, for one more. Thread-safe. See ``require_one``."""
        with self._lock:
            self.require_one()
            member = min(self.admitted, key=lambda member: member.outstanding)
            member.outstanding += 1
        try:
            yield member
        finally:
            with self._lock:
                member.outstanding -= 1

    # -- admission --------------------------------------------------------------------------------------------------

    def returning(self, members: Sequence[M]) -> list[M]:
        """Evicted ``members`` that are back: awake, with weights of an unknown version."""
        found = outcomes(members, self._is_back)
        for member, error in found:
            member.evicted = str(error) if error else member.evicted
        return [member for member, error in found if error is None]

    def _is_back(self, member: M) -> None:
        # where nobody else is left, one that is being started again is waited for
        member.client.require_health(patience=self.impatience if self.admitted else self.patience)
        self._renew(member)
        member.slept = member.compared = False
        member.version = None

    def readmit(self, members: Sequence[M]) -> None:
        """Admit again whoever draws real samples as before: that a server is alive says little."""
        for member, error in outcomes(members, self._require_same_samples):
            member.evicted = str(error) if error else ""
            log.warning("%s %s", member.client.url, f"stays evicted: {error}" if error else "is readmitted")

    # -- eviction ---------------------------------------------------------------------------------------------------

    def evict(self, member: M, reason: EngineError) -> None:
        if not member.evicted:  # of several requests that fail, the first gives the reason
            member.evicted = str(reason)
            log.warning("%s is evicted: %s", member.client.url, reason)

    def evict_unreachable(self) -> None:
        for member, error in outcomes(self.admitted, self._require_health):
            if error:
                self.evict(member, error)

    def _require_health(self, member: M) -> None:
        member.client.require_health(patience=self.patience)

    def evict_changed(self, members: Iterable[M]) -> list[M]:
        """Evict and return the ``members`` whose checksum is not that of the weights that they were sent last."""
        changed = [(member, error) for member, error in outcomes(list(members), self._require_unchanged) if error]
        for member, error in changed:
            self.evict(member, error)
        return [member for member, _ in changed]

    def health(self) -> Mapping[str, str]:
        """server -> empty, or what is wrong with it."""
        found = dict(outcomes(self.admitted, self._require_health))
        return {member.client.url: member.evicted or str(found.get(member) or "") for member in self.members}

    # -- memory -----------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Return when every server that answers has given its memory back: a trainer may use the device then."""
        self.evict_unreachable()
        self._settle(asleep=True)
        for member, error in outcomes(self.evicted, lambda member: self._switch(member, True, self.impatience)):
            if error and not isinstance(error, EngineGone) and not nobody_listens(error):
                log.warning("%s may keep its memory while trainers compute: %s", member.client.url, error)
        self.asleep = True

    def wake(self) -> None:
        self.evict_unreachable()
        self._settle(asleep=False)
        self.asleep = False

    def _settle(self, *, asleep: bool) -> None:
        for member, error in outcomes(self.admitted, lambda member: self._settled(member, asleep)):
            if isinstance(error, EngineUnavailable):
                self.evict(member, error)
            elif error:
                raise error
        if not self.attached:  # nobody starts those again; of others, one may be back for the next weights
            self.require_one()

    def close(self) -> None:
        """Wake servers that others go on using; those of the run end with it."""
        if self.attached:
            slept = [member for member in self.members if member.slept]
            for member, error in outcomes(slept, lambda member: self._switch(member, False, self.impatience)):
                if error:
                    log.warning("%s may be left asleep: %s", member.client.url, error)
        for member in self.members:
            member.client.close()
