"""In-process rollout engine: no server, one copy of the student's network."""

from miles_dmd.contracts.engine import EngineType
from miles_dmd.sampling.strategies import FEW_STEP

engine = EngineType(
    builds={
        "diffusion": "miles_dmd.engines.inprocess.sampler:build",
        "language": "miles_dmd.engines.inprocess.tokens:build",
    },
    rollouts={**FEW_STEP, "on_policy_tokens": {}},
)
