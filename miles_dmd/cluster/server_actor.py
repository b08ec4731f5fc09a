"""Ray actor that starts a rollout server on a bundle of the run, and ends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from miles_dmd import registry
from miles_dmd.cluster.placement import Placement
from miles_dmd.cluster.waiting import Supervisor
from miles_dmd.cluster.watched import GROUP, Watched, actor_class
from miles_dmd.contracts.engine import Serve
from miles_dmd.errors import ConfigError

LOOPBACK = "127.0.0.1"


class ServerActor(Watched):
    def serve(self, args: Any, device: str, number: int) -> str:
        """Start it and wait until it answers; its address."""
        engine = registry.load("engines", args.rollout_engine)
        host = ray.util.get_node_ip_address() if engine.beyond_node(args) else LOOPBACK
        serve: Serve = registry.resolve(engine.serve)
        self.server = serve(args, device=device, number=number, host=host)
        return self.server.wait()

    @ray.method(concurrency_group=GROUP)  # type: ignore[untyped-decorator]
    def close(self) -> None:
        """Also while another thread waits for the server to start."""
        if hasattr(self, "server"):
            self.server.close()


class RayServer:
    """Its process starts at once, the server when it is told to ``serve``."""

    def __init__(self, args: Any, placement: Placement, number: int, supervisor: Supervisor) -> None:
        self.name = f"rollout server {number}"
        self.args, self.device, self.number = args, placement.device, number
        self.bundle = number % placement.group.bundle_count
        self._require_reachable(args, placement, self.bundle)
        self.actor = actor_class(ServerActor).options(**placement.options(self.bundle)).remote()
        supervisor.watch(self.name, self.actor)

    def _require_reachable(self, args: Any, placement: Placement, bundle: int) -> None:
        nodes = placement.nodes()
        if nodes[bundle] != nodes[0] and not registry.load("engines", args.rollout_engine).beyond_node(args):
            raise ConfigError(
                f"{self.name} would be on another node than the rollout worker, which does not reach its loopback; "
                "pass --sglang-host node (servers have no authentication: in a private network only), or fewer servers"
            )

    def serve(self) -> ray.ObjectRef:
        """The call that gives its address once it answers."""
        return self.actor.serve.remote(self.args, self.device, self.number)

    def closing(self) -> list[ray.ObjectRef]:
        """Asked nicely, a server leaves no shared memory."""
        return [self.actor.close.remote()]

    def kill(self) -> None:
        ray.kill(self.actor)  # a server whose actor is gone notices, and ends


def serve_all(servers: Sequence[RayServer], supervisor: Supervisor) -> list[str]:
    """The addresses of all, once they answer. Those of one bundle start in turn: each looks how much of the device is
    free, and a server that loads beside another takes it for its own."""
    urls: dict[str, str] = {}
    left = list(servers)
    while left:
        turn = list({server.bundle: server for server in reversed(left)}.values())  # the first of each bundle
        found = supervisor.gather({server.name: server.serve() for server in turn}, "starting")
        urls |= {server.name: url for server, url in zip(turn, found, strict=True)}
        left = [server for server in left if server not in turn]
    return [urls[server.name] for server in servers]
