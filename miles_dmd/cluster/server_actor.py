"""A server of the rollout engine, started by a Ray actor on a bundle of the run's, and ended with that actor."""

from __future__ import annotations

from typing import Any

import ray

from miles_dmd import registry
from miles_dmd.cluster.placement import Placement
from miles_dmd.cluster.waiting import Supervisor
from miles_dmd.cluster.watched import Watched, actor_class
from miles_dmd.contracts.engine import Server


class ServerActor(Watched):
    def start(self, args: Any, device: str, number: int) -> str:
        """The server's address. It listens where this node is reached by the run's others: on a local cluster, on
        loopback."""
        engine = registry.load("engines", args.rollout_engine)
        host = ray.util.get_node_ip_address()
        self.server: Server = registry.resolve(engine.serve)(args, device=device, number=number, host=host)
        return self.server.url

    def wait(self) -> None:
        self.server.wait()

    def close(self) -> None:
        self.server.close()


class RayServer:
    """Starts at once; ``wait`` gives the call to wait for."""

    def __init__(self, args: Any, placement: Placement, number: int, supervisor: Supervisor) -> None:
        self.name = f"rollout server {number}"
        bundle = number % placement.group.bundle_count
        self.actor = actor_class(ServerActor).options(**placement.options(bundle)).remote()
        supervisor.watch(self.name, self.actor)
        started = self.actor.start.remote(args, placement.device, number)
        self.url = str(supervisor.fetch(started, self.name, "starting"))

    def wait(self) -> dict[str, ray.ObjectRef]:
        return {self.name: self.actor.wait.remote()}

    def kill(self) -> None:
        # the server notices that its actor is gone, and ends; asked nicely first, it also leaves no shared memory
        ray.wait([self.actor.close.remote()], timeout=10)
        ray.kill(self.actor)
