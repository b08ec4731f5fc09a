"""The student samples in the rollout worker's own process: no server, one copy of the network."""

from miles_dmd.contracts.engine import EngineType
from miles_dmd.sampling.strategies import FEW_STEP

engine = EngineType(build="miles_dmd.engines.inprocess.sampler:build", rollouts=FEW_STEP)
