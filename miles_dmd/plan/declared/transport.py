"""The way of scores to the student. A run has one of them: within the process or over Ray's object store."""

from __future__ import annotations

from miles_dmd.errors import PlanError
from miles_dmd.plan.frozen import immutable
from miles_dmd.validators import choice

PROVIDERS = ("colocated", "ray")
TENSOR_BACKENDS = ("local", "ray_nixl", "mooncake")


@immutable
class ScoreTransportSpec:
    """Transport of scores to the student: within the placement, or from Ray actors elsewhere."""

    provider: str = "colocated"
    tensor_backend: str = "local"

    def __post_init__(self) -> None:
        choice("ScoreTransportSpec.provider", self.provider, PROVIDERS)
        choice("ScoreTransportSpec.tensor_backend", self.tensor_backend, TENSOR_BACKENDS)
        if (self.provider == "colocated") != (self.tensor_backend == "local"):
            raise PlanError(
                f"score transport {self.provider!r} cannot use the tensor backend {self.tensor_backend!r}; "
                "colocated takes local, ray takes ray_nixl or mooncake"
            )
