"""The in-process engine; place ``sync``, while it takes new weights."""

from faulty.places import come_to
from miles_dmd.contracts.engine import EngineType
from miles_dmd.engines.inprocess import engine as inprocess

engine = EngineType(build="faulty.engine:build", rollouts=inprocess.rollouts)


def build(*args, **more):
    from miles_dmd import registry

    built = registry.resolve(inprocess.build)(*args, **more)
    take, sample = built.update_weights, built.generate

    def generate(requests):
        come_to("sampling", "rollout")
        return sample(requests)

    def update_weights(buckets, version):
        come_to("sync", "rollout")
        take(buckets, version)

    built.generate, built.update_weights = generate, update_weights
    return built
