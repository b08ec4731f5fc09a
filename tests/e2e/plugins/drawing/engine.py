"""The in-process engine, with noise in its clean predictions."""

import dataclasses

from drawing import drawn
from miles_dmd.engines.inprocess import engine as inprocess

engine = dataclasses.replace(inprocess, builds={"diffusion": "drawing.engine:build"})


def build(*args, **more):
    from miles_dmd import registry

    built = registry.resolve(inprocess.builds["diffusion"])(*args, **more)
    sample = built.generate

    def generate(requests):
        batch = sample(requests)
        return dataclasses.replace(batch, clean=batch.clean + drawn())

    built.generate = generate
    return built
