"""Rollout strategies: names in a plan, and the arguments under which a sampler plays each."""

from collections.abc import Mapping
from typing import Any

FEW_STEP: Mapping[str, Mapping[str, Any]] = {
    "one_step": {"num_inference_steps": 1},
    "ode_euler": {"solver": "euler"},
    "consistency_renoise": {"solver": "renoise"},
    "backward_simulated": {"solver": "renoise"},  # DMD2's backward simulation is sampling by re-noising
}
ON_POLICY: Mapping[str, Mapping[str, Any]] = {"on_policy_tokens": {}}
