"""Reader of the nested configuration of an RL stack, and the plan that it asks for.

What is read of it, each level a mapping or an object with attributes; null is unset:

    algorithm: {trainer_type: distillation}
    actor_rollout_ref: {model: {path: ...}}
    distillation:
      enabled: false                                 # the switch of on-policy distillation (OPD)
      distribution_matching: {recipe: dmd2, fake_update_ratio: 5, ...}
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from miles_dmd.errors import PlanError
from miles_dmd.plan.plan import DistillationPlan
from miles_dmd.plan.recipe import SETTINGS, read
from miles_dmd.plan.recipes import build_plan
from miles_dmd.registry import nearest
from miles_dmd.shown import short_repr
from miles_dmd.validators import flag

DEFAULT_RECIPE = "dmd2"
TRAINER_TYPES = {"distillation": "distribution_matching"}
"""trainer type -> the capability that its plans require."""
DECLARABLE = frozenset({"distribution_matching", "autoregressive", "adversarial", "token_matching"})
"""Every capability of a shipped recipe: a plan may be declared and inspected before anything can run it."""
PLAN_SETTINGS = (*SETTINGS, "causal_model_path", "bidirectional_model_path", "actor_model_path", "critic_model_path")
TRAINER_SETTINGS = (
    *("student_micro_batch_size", "fake_micro_batch_size", "fake_lr", "fake_weight_decay", "fake_clip_grad"),
    *("fake_lr_scheduler", "ema_decay", "ema_start_step"),
)


@dataclass(frozen=True, slots=True)
class NestedForm:
    """Content of the nested form."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of ``distribution_matching`` that are set; ``model_path`` also from ``actor_rollout_ref``."""
    capability: str | None = None
    """Capability that the plan must require; None where it has neither a trainer type nor ``distribution_matching``."""
    on_policy: bool = False
    where: str = ""
    """Put before the names of its keys in messages."""

    def require_agreement(self, plan: DistillationPlan, asked: str) -> None:
        """Raises PlanError where the plan of ``asked`` is of another kind."""
        if self.capability is not None and self.capability not in plan.required_capabilities:
            raise PlanError(
                f"{asked} disagrees with {self.where}algorithm.trainer_type 'distillation', which is "
                f"{self.capability.replace('_', ' ')}; drop one of the two"
            )
        if self.on_policy and "distribution_matching" in plan.required_capabilities:
            raise PlanError(
                f"{self.where}distillation.enabled must be false: it turns on-policy distillation on, and distribution "
                f"matching ({asked}) must keep the OPD off"
            )


UNASKED = NestedForm()


def read_nested(config: Any, where: str = "", *, strict: bool = False) -> NestedForm:
    """Raises PlanError for an unknown setting, and, if ``strict``, for any key beside those above."""
    algorithm, ref, distillation = (
        _level(config, key, where, known, strict)
        for key, known in (
            ("algorithm", ("trainer_type",)),
            ("actor_rollout_ref", ("model",)),
            ("distillation", ("enabled", "distribution_matching")),
        )
    )
    model = _level(ref, "model", f"{where}actor_rollout_ref.", ("path",), strict)
    name, block = f"{where}distillation.", distillation.get("distribution_matching")
    known = ("recipe", *PLAN_SETTINGS, *TRAINER_SETTINGS)
    settings = _level(distillation, "distribution_matching", name, known, strict or isinstance(block, Mapping))
    trainer_type = algorithm.get("trainer_type", None if block is None else "distillation")
    if trainer_type is not None and not (isinstance(trainer_type, str) and trainer_type in TRAINER_TYPES):
        raise PlanError(
            f"{where}algorithm.trainer_type {short_repr(trainer_type)} is not among {', '.join(TRAINER_TYPES)}; "
            "leave it out, and the loss type decides"
        )
    return NestedForm(
        {**({"model_path": model["path"]} if model else {}), **settings},
        trainer_type and TRAINER_TYPES[trainer_type],
        flag(f"{name}enabled", distillation.get("enabled", False)),
        where,
    )


def build_plan_from_config(config: Any, capabilities: Collection[str] = DECLARABLE) -> DistillationPlan:
    """The plan of ``distillation.distribution_matching``; PlanError for what is missing, unknown or at odds with it."""
    form = read_nested(config)
    if read(read(config, "distillation"), "distribution_matching") is None:
        raise PlanError(f"distillation.distribution_matching is required; name its recipe, such as {DEFAULT_RECIPE}")
    recipe = form.settings.get("recipe", DEFAULT_RECIPE)
    settings = {name: value for name, value in form.settings.items() if name in PLAN_SETTINGS}
    plan = build_plan(recipe, settings, capabilities)
    form.require_agreement(plan, f"recipe {recipe!r}")
    return plan


def mapping(value: Any, where: str, known: Collection[str] | None = None) -> Mapping[str, Any]:
    """``value``, or nothing for null. Raises PlanError for another type, or for a key that is not ``known``."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise PlanError(f"{where} must hold names and values (name: value), not {type(value).__name__}")
    for key in value:
        if not isinstance(key, str):
            raise PlanError(f"{where}: key {short_repr(key)} must be a name")
        if known is not None and key not in known:
            raise PlanError(
                f"{where}: unknown key {short_repr(key)}; there are {', '.join(known)}{nearest(key, known)}"
            )
    return value


def _level(config: Any, key: str, where: str, known: Collection[str], strict: bool) -> dict[str, Any]:
    """The ``known`` keys of ``config``'s ``key`` that are set."""
    value = read(config, key)
    if strict or not hasattr(value, "__dict__"):
        mapping(value, f"{where}{key}", known if strict else None)
    return {name: found for name in known if (found := read(value, name)) is not None}
