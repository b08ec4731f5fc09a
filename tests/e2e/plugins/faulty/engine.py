"""The in-process engine; place ``sync``, while it takes new weights."""

import sys

from faulty.places import come_to, show_requests
from miles_dmd.contracts.engine import EngineType
from miles_dmd.engines.inprocess import engine as inprocess


def num_servers(args):
    """None. A driver that is about to start Ray's actors calls this: from here on it shows its requests to Ray."""
    if timed := sys.modules.get("miles_dmd.cluster.supervision.timed_calls"):
        show_requests(timed.TimedCalls)
    return 0


engine = EngineType(builds={"diffusion": "faulty.engine:build"}, rollouts=inprocess.rollouts, num_servers=num_servers)


def build(*args, **more):
    from miles_dmd import registry

    built = registry.resolve(inprocess.builds["diffusion"])(*args, **more)
    take, sample = built.update_weights, built.generate

    def generate(requests):
        come_to("sampling", "rollout")
        return sample(requests)

    def update_weights(buckets, version):
        come_to("sync", "rollout")
        take(buckets, version)

    built.generate, built.update_weights = generate, update_weights
    return built
