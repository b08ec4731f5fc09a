"""The student samples in the rollout worker's own process: no server, one copy of the network."""

from miles_dmd.contracts.engine import EngineType

engine = EngineType(build="miles_dmd.engines.inprocess.sampler:build")
