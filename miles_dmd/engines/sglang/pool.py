"""Several servers: who is asked next, and who is out of it, and why."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
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
