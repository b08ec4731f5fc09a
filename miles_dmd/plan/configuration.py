"""How does the nested configuration of an RL stack become a plan? It is read once, and routed or refused.

What is read of it:

    algorithm: {trainer_type: distillation}          # unset: the loss type decides
    distillation:
      enabled: false                                 # the switch of on-policy distillation (OPD)
      distribution_matching: {recipe: dmd2, fake_update_ratio: 5, ...}
    actor_rollout_ref: {model: {path: ...}}
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from miles_dmd.errors import PlanError
from miles_dmd.plan.frozen import choice, flag
from miles_dmd.plan.plan import DistillationPlan
from miles_dmd.plan.recipes import SETTINGS, build_plan, read

TRAINER_TYPES = {"distillation": "distribution_matching"}
"""trainer type -> the capability that its plans require."""
DECLARABLE = frozenset({"distribution_matching", "autoregressive", "adversarial", "token_matching"})
"""Every capability of a shipped recipe: a plan may be declared and inspected before anything can run it."""
PLAN_KEYS = (*SETTINGS, "causal_model_path", "bidirectional_model_path", "actor_model_path", "critic_model_path")
TRAINING_KEYS = (
    "student_micro_batch_size",
    "fake_micro_batch_size",
    "fake_lr",
    "fake_weight_decay",
    "fake_clip_grad",
    "fake_lr_scheduler",
    "ema_decay",
    "ema_start_step",
)
"""Keys of the block that are no part of a plan but of the trainers' arguments."""


def settings_from_config(config: Any) -> dict[str, Any]:
    """``distillation.distribution_matching`` without its nulls, ``recipe`` and ``model_path`` filled in.

    Every level may be a mapping or have attributes. PlanError for a missing block and for an unknown key in it.
    """
    block = read(read(config, "distillation"), "distribution_matching")
    if block is None:
        raise PlanError("distillation.distribution_matching is required; name at least its recipe, such as dmd2")
    known = ("recipe", *PLAN_KEYS, *TRAINING_KEYS)
    for key in block if isinstance(block, Mapping) else ():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1) or [", ".join(known)]
            raise PlanError(f"unknown key distillation.distribution_matching.{key}; known is {near[0]}")
    model_path = read(read(read(config, "actor_rollout_ref"), "model"), "path")
    settings = {key: read(block, key) for key in known}
    settings |= {"recipe": read(block, "recipe", "dmd2"), "model_path": read(block, "model_path", model_path)}
    return {key: value for key, value in settings.items() if value is not None}


def check_route(plan: DistillationPlan, loss_type: str, trainer_type: Any = None, enabled: Any = None) -> None:
    """Refuses a trainer type that is unknown or at odds with ``loss_type``, and OPD beside distribution matching."""
    if trainer_type is not None:
        choice("algorithm.trainer_type, where it is set,", trainer_type, TRAINER_TYPES)
        if TRAINER_TYPES[trainer_type] not in plan.required_capabilities:
            raise PlanError(
                f"algorithm.trainer_type {trainer_type!r} is distribution matching and --loss-type {loss_type!r} is "
                "not; drop one of the two"
            )
    opd_on = enabled is not None and flag("distillation.enabled", enabled)
    if opd_on and "distribution_matching" in plan.required_capabilities:
        raise PlanError(
            f"distillation.enabled=true turns on-policy distillation on; --loss-type {loss_type!r} must keep the OPD "
            "switch off: set distillation.enabled=false"
        )


def build_plan_from_config(config: Any, capabilities: Collection[str] = DECLARABLE) -> DistillationPlan:
    """The plan that the nested form describes; training keys are left to whoever reads the trainers' arguments."""
    settings = settings_from_config(config)
    recipe = settings.pop("recipe")
    plan = build_plan(recipe, {key: settings[key] for key in PLAN_KEYS if key in settings}, capabilities)
    check_route(
        plan, recipe, read(read(config, "algorithm"), "trainer_type"), read(read(config, "distillation"), "enabled")
    )
    return plan
