"""Server pool: load balancing, and which servers are evicted and why."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from miles_dmd.engines.sglang.client import Client
from miles_dmd.engines.sglang.probe import Capabilities
from miles_dmd.errors import EngineError


@dataclass(eq=False)
class Member:
    client: Client
    capabilities: Capabilities
    wrong: str = ""
    """Why it is not asked; empty while it is."""
    version: int | None = None
    """Of the weights that it holds."""
    law: str = ""
    """How its samples differ from the in-process engine's; empty where they do not."""
    compared: bool = False
    """Whether weights that it was sent have been compared with what it holds."""
    checksum: str = ""
    """Of its network after the last update, where it does not count updates."""
    slept: bool = False
    """Whether the run has put it to sleep, and not woken it since."""
    outstanding: int = field(default=0, repr=False)


class Pool:
    """Hands out the server with the least requests under way. Safe to use from several threads."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = tuple(members)
        self._lock = threading.Lock()

    @property
    def admitted(self) -> tuple[Member, ...]:
        return tuple(member for member in self.members if not member.wrong)

    @property
    def out(self) -> tuple[Member, ...]:
        return tuple(member for member in self.members if member.wrong)

    def require_one(self) -> None:
        """Raises EngineError where none is left, with what is wrong with each."""
        if not self.admitted:
            raise EngineError(f"no SGLang server is left: {'; '.join(member.wrong for member in self.members)}")

    @contextlib.contextmanager
    def taken(self) -> Iterator[Member]:
        """See ``require_one``."""
        with self._lock:
            self.require_one()
            member = min(self.admitted, key=lambda member: member.outstanding)
            member.outstanding += 1
        try:
            yield member
        finally:
            with self._lock:
                member.outstanding -= 1


def outcomes(members: Sequence[Member], call: Callable[[Member], object]) -> list[tuple[Member, EngineError | None]]:
    """``call`` for all of them at once: one that hangs keeps no other waiting. Each with its failure, or None."""

    def tried(member: Member) -> EngineError | None:
        try:
            call(member)
        except EngineError as error:
            return error
        return None

    if not members:
        return []
    with ThreadPoolExecutor(len(members)) as threads:
        return list(zip(members, threads.map(tried, members), strict=True))
