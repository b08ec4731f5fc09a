"""Rollout engine over a fleet of servers: samples of one policy version, drawn again elsewhere where a server fails."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch import Tensor

from miles_dmd.client import Client
from miles_dmd.engines.sglang.delivery import Delivery, InRequests, ThroughFolder, Transport
from miles_dmd.engines.sglang.fleet import Fleet, M
from miles_dmd.engines.sglang.folders import OwnFolder, weights_root
from miles_dmd.errors import EngineError, EngineUnavailable

if TYPE_CHECKING:
    from miles_dmd.config.args import Args
    from miles_dmd.engines.sglang import Options

R = TypeVar("R")
S = TypeVar("S")


class ServedEngine(ABC, Generic[M]):
    """Engine over servers, whatever these sample."""

    fleet: Fleet[M]
    notes: tuple[str, ...]

    def __init__(self, args: Args) -> None:
        self.args = args
        self.options: Options = args.engine_options
        self._folder: OwnFolder | None = None
        self.version: int | None = 0
        """Version of the weights that all admitted servers hold; None where an update has failed."""

    # -- sampling ---------------------------------------------------------------------------------------------------

    def drawn(self, requests: Sequence[R], take: Callable[[M, R], S]) -> list[S]:
        """``take(member, request)`` for each request, in their order."""
        threads = ThreadPoolExecutor(max(len(self.fleet.admitted), 1) * self.options.sglang_concurrency)
        try:
            futures: list[Future[S]] = [threads.submit(self._one, request, take) for request in requests]
            return [future.result() for future in futures]
        finally:
            threads.shutdown(wait=True, cancel_futures=True)

    def _one(self, request: R, take: Callable[[M, R], S]) -> S:
        """From some server; one that does not answer is evicted, and the next one is asked."""
        while True:
            with self.fleet.taken() as member:
                try:
                    return take(member, request)
                except EngineUnavailable as error:
                    self.fleet.evict(member, error)

    def held(self) -> int:
        """Version of the weights; raises EngineError while the engine sleeps or none are whole."""
        self._require_awake()
        if self.version is None:
            raise EngineError(
                "the last weight update failed, so the servers hold parts of it; start again from a checkpoint"
            )
        return self.version

    def _require_awake(self) -> None:
        if self.fleet.asleep:
            raise EngineError("the rollout engine is asleep; wake it before it samples or takes weights")

    # -- weights ----------------------------------------------------------------------------------------------------

    def update_weights(self, buckets: Iterable[Mapping[str, Tensor]], version: int) -> None:
        """All admitted servers or none; servers that are back are given the weights too, and readmitted."""
        self._require_awake()
        returning = self.fleet.returning(self.fleet.evicted)
        self.fleet.evict_unreachable()
        # one that was restarted since its last sample is compared as at the start, like any that is back
        returning += self.fleet.returning(self.fleet.evict_changed(self.fleet.admitted))
        if not returning:
            self.fleet.require_one()
        delivery = Delivery(version, must=self.fleet.admitted, may=returning)
        # until all is done, nobody knows what the servers hold
        self.version = None
        self._push(buckets, delivery)
        self.fleet.readmit(delivery.returned)
        self.fleet.require_one()
        self.version = version

    @abstractmethod
    def _push(self, buckets: Iterable[Mapping[str, Tensor]], delivery: Delivery[M]) -> None:
        """Send and compare. Raises EngineError unless all of ``delivery.members`` have taken all of it."""

    def transport(self, delivery: Delivery[M], *, on_cpu: bool, more: Mapping[str, Any], part: str = "") -> Transport:
        """``on_cpu``: all servers are; ``more`` and ``part``: see ``InRequests`` and ``ThroughFolder``."""
        how = self.options.sglang_weights
        if how == "auto":
            how = "tensor" if on_cpu else "disk"
        if how == "tensor":
            return InRequests(delivery.each, more)
        self._folder = self._folder or OwnFolder(weights_root(self.args))
        return ThroughFolder(delivery.each, more, self._folder.fresh(f"version{delivery.version}"), part)

    # -- memory, health, end ----------------------------------------------------------------------------------------

    def sleep(self) -> None:
        self.fleet.sleep()

    def wake(self) -> None:
        self.fleet.wake()

    def health(self) -> Mapping[str, str]:
        return self.fleet.health()

    def close(self) -> None:
        if self._folder is not None:
            self._folder.close()
            self._folder = None
        self.fleet.close()


def clients_of(options: Options, servers: Sequence[str]) -> list[Client]:
    """Clients of the servers that the user names, or else of those that the run has started."""
    return [
        Client(
            url,
            timeout=options.sglang_timeout,
            deadline=options.sglang_deadline,
            connections=options.sglang_concurrency,
            managed=not options.sglang_url,
        )
        for url in options.sglang_url or servers
    ]
