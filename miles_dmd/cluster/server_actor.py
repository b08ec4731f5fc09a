"""A server of the rollout engine, started by a Ray actor on a bundle of the run's, and ended with that actor."""

from __future__ import annotations

from typing import Any

import ray

from miles_dmd import registry
from miles_dmd.cluster.placement import Placement
from miles_dmd.cluster.waiting import Supervisor
from miles_dmd.cluster.watched import GROUP, Watched, actor_class
from miles_dmd.contracts.engine import Server
from miles_dmd.errors import ConfigError

LOOPBACK = "127.0.0.1"


class ServerActor(Watched):
    def start(self, args: Any, device: str, number: int) -> str:
        """The server's address."""
        engine = registry.load("engines", args.rollout_engine)
        host = ray.util.get_node_ip_address() if engine.beyond_node(args) else LOOPBACK
        self.server: Server = registry.resolve(engine.serve)(args, device=device, number=number, host=host)
        return self.server.url

    def wait(self) -> None:
        self.server.wait()

    @ray.method(concurrency_group=GROUP)  # type: ignore[untyped-decorator]
    def close(self) -> None:
        """Also while another thread waits for the server to start."""
        if hasattr(self, "server"):
            self.server.close()


class RayServer:
    """Starts at once; ``wait`` gives the call to wait for."""

    def __init__(self, args: Any, placement: Placement, number: int, supervisor: Supervisor) -> None:
        self.name = f"rollout server {number}"
        bundle = number % placement.group.bundle_count
        self._require_reachable(args, placement, bundle)
        self.actor = actor_class(ServerActor).options(**placement.options(bundle)).remote()
        supervisor.watch(self.name, self.actor)
        supervisor.await_start()
        started = self.actor.start.remote(args, placement.device, number)
        self.url = str(supervisor.fetch(started, self.name, "starting"))

    def _require_reachable(self, args: Any, placement: Placement, bundle: int) -> None:
        nodes = placement.nodes()
        if nodes[bundle] != nodes[0] and not registry.load("engines", args.rollout_engine).beyond_node(args):
            raise ConfigError(
                f"{self.name} would be on another node than the rollout worker, which does not reach its loopback; "
                "pass --sglang-host node (servers have no authentication: in a private network only), or fewer servers"
            )

    def wait(self) -> dict[str, ray.ObjectRef]:
        return {self.name: self.actor.wait.remote()}

    def closing(self) -> list[ray.ObjectRef]:
        """Asked nicely, a server leaves no shared memory."""
        return [self.actor.close.remote()]

    def kill(self) -> None:
        ray.kill(self.actor)  # a server whose actor is gone notices, and ends
