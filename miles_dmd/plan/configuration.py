"""How does the nested configuration of an RL stack become a plan? It is read once, and routed or refused.

What is read of it, each level a mapping or an object with attributes:

    algorithm: {trainer_type: distillation}          # may be unset
    actor_rollout_ref: {model: {path: ...}}
    distillation:
      enabled: false                                 # the switch of on-policy distillation (OPD)
      distribution_matching: {recipe: dmd2, fake_update_ratio: 5, ...}
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from miles_dmd.errors import PlanError
from miles_dmd.plan.plan import DistillationPlan
from miles_dmd.plan.recipe import SETTINGS, read
from miles_dmd.plan.recipes import build_plan
from miles_dmd.registry import nearest
from miles_dmd.validators import choice, flag

TRAINER_TYPES = {"distillation": "distribution_matching"}
"""trainer type -> the capability that its plans require."""
DECLARABLE = frozenset({"distribution_matching", "autoregressive", "adversarial", "token_matching"})
"""Every capability of a shipped recipe: a plan may be declared and inspected before anything can run it."""
_PLAN_KEYS = (*SETTINGS, "causal_model_path", "bidirectional_model_path", "actor_model_path", "critic_model_path")
_TRAINER_KEYS = (
    *("student_micro_batch_size", "fake_micro_batch_size", "fake_lr", "fake_weight_decay", "fake_clip_grad"),
    *("fake_lr_scheduler", "ema_decay", "ema_start_step"),
)
"""Settings of the trainers, known and left to them."""


def build_plan_from_config(config: Any, capabilities: Collection[str] = DECLARABLE) -> DistillationPlan:
    """The plan of ``distillation.distribution_matching``; PlanError for what is missing, unknown or at odds with it."""
    distillation = read(config, "distillation")
    block = read(distillation, "distribution_matching")
    if block is None:
        raise PlanError("distillation.distribution_matching is required; name at least its recipe, such as dmd2")
    _refuse_unknown_keys(block)
    recipe = read(block, "recipe", "dmd2")
    settings = {key: read(block, key) for key in _PLAN_KEYS}
    if settings["model_path"] is None:
        settings["model_path"] = read(read(read(config, "actor_rollout_ref"), "model"), "path")
    plan = build_plan(recipe, settings, capabilities)
    if (trainer_type := read(read(config, "algorithm"), "trainer_type")) is not None:
        choice("algorithm.trainer_type, where it is set,", trainer_type, TRAINER_TYPES)
        if TRAINER_TYPES[trainer_type] not in plan.required_capabilities:
            raise PlanError(
                f"algorithm.trainer_type {trainer_type!r} disagrees with recipe {recipe!r}; drop one of them"
            )
    if flag("distillation.enabled", read(distillation, "enabled", False)):
        raise PlanError(
            "distillation.enabled=true turns on-policy distillation on; distribution matching must keep the OPD off"
        )
    return plan


def _refuse_unknown_keys(block: Any) -> None:
    known = ("recipe", *_PLAN_KEYS, *_TRAINER_KEYS)
    for key in block if isinstance(block, Mapping) else ():
        if key not in known:
            raise PlanError(
                f"unknown key distillation.distribution_matching.{key}{nearest(str(key), known)}; there are "
                f"{', '.join(known)}"
            )
