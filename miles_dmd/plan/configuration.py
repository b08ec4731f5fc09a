"""Reader of the nested configuration of an RL stack, and the plan that it asks for.

What is read of it, each level a mapping or an object with attributes; null is unset:

    algorithm: {trainer_type: distillation}
    actor_rollout_ref: {model: {path: ..., use_fused_kernels: false}, actor: {use_torch_compile: false}}
    distillation:
      enabled: false                                 # the switch of on-policy distillation (OPD)
      distribution_matching: {recipe: dmd2, fake_update_ratio: 5, ...}
      distillation_loss: {loss_mode: resopd, topk: 4, use_policy_gradient: false, ...}     # read where enabled is true
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
from miles_dmd.validators import flag, positive

DEFAULT_RECIPE = "dmd2"
ON_POLICY_RECIPE, ON_POLICY_LOSS = "opd", "resopd"
TRAINER_TYPES = {"distillation": "distribution_matching"}
"""trainer type -> the capability that its plans require."""
DECLARABLE = frozenset({"distribution_matching", "autoregressive", "adversarial", "token_matching"})
"""Every capability of a shipped recipe: a plan may be declared and inspected before anything can run it."""
PLAN_SETTINGS = (*SETTINGS, "causal_model_path", "bidirectional_model_path", "actor_model_path", "critic_model_path")
TRAINER_SETTINGS = (
    *("student_micro_batch_size", "fake_micro_batch_size", "fake_lr", "fake_weight_decay", "fake_clip_grad"),
    *("fake_lr_scheduler", "ema_decay", "ema_start_step"),
)
FIXED = {
    "use_policy_gradient": (False, "the score gradient is built into the loss, and a policy gradient adds it again"),
    "use_task_rewards": (False, "the loss is the divergence to the teacher alone; there are no rewards"),
    "loss_max_clamp": (None, "a clamped loss drops gradients, which biases the estimator"),
    "log_prob_min_clamp": (None, "a clamped log-prob moves mass, which biases the estimator"),
}
"""setting of ``distillation_loss`` -> the one value that it may have, and why."""
ON_POLICY_SETTINGS = ("loss_mode", "topk", *FIXED)
SWITCHES = {
    "model": {"use_fused_kernels": "the loss reads logits, and a fused head has none to show"},
    "actor": {"use_torch_compile": "nothing here is compiled"},
}
"""level of ``actor_rollout_ref`` -> its settings that may be false alone -> why."""
NOT_OFFERED = {
    "k1": "differentiated directly, its expected gradient is zero",
    "k3": "its expected gradient is that of the forward KL, not of the reverse KL that its value estimates",
    "low_var_kl": "its expected gradient is that of the forward KL, not of the reverse KL that its value estimates",
    "abs": "only the sign of the log-ratio reaches its gradient",
    "forward_kl_topk": "without the tail it is no divergence: it falls below zero, and pushes the tail anywhere",
    "reverse_kl_topk": "without the tail the student lowers it by giving up its own head mass",
    "reverse_kl_student_topk": "without the tail the student lowers it by giving up its own head mass",
}
"""Loss of other trainers -> why there is none of that name here."""


@dataclass(frozen=True, slots=True)
class NestedForm:
    """Content of the nested form."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of ``distribution_matching`` that are set; ``model_path`` also from ``actor_rollout_ref``."""
    capability: str | None = None
    """Capability that the plan must require; None where it has neither a trainer type nor ``distribution_matching``."""
    on_policy: bool = False
    on_policy_settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of ``distillation_loss`` that are set, of which some value is a choice."""
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
            ("actor_rollout_ref", tuple(SWITCHES)),
            ("distillation", ("enabled", "distribution_matching", "distillation_loss")),
        )
    )
    model, _ = (
        _switched_off(ref, level, f"{where}actor_rollout_ref.", known, strict)
        for level, known in (("model", ("path",)), ("actor", ()))
    )
    name, block = f"{where}distillation.", distillation.get("distribution_matching")
    known = ("recipe", *PLAN_SETTINGS, *TRAINER_SETTINGS)
    settings = _level(distillation, "distribution_matching", name, known, strict or isinstance(block, Mapping))
    trainer_type = algorithm.get("trainer_type", None if block is None else "distillation")
    if trainer_type is not None and not (isinstance(trainer_type, str) and trainer_type in TRAINER_TYPES):
        raise PlanError(
            f"{where}algorithm.trainer_type {short_repr(trainer_type)} is not among {', '.join(TRAINER_TYPES)}; "
            "leave it out, and the loss type decides"
        )
    on_policy = flag(f"{name}enabled", distillation.get("enabled", False))
    return NestedForm(
        {**({"model_path": model["path"]} if model else {}), **settings},
        trainer_type and TRAINER_TYPES[trainer_type],
        on_policy,
        _on_policy_settings(distillation, on_policy, name, strict),
        where,
    )


def _switched_off(ref: Any, level: str, where: str, known: Collection[str], strict: bool) -> dict[str, Any]:
    """The ``known`` keys of ``level`` that are set, beside its SWITCHES."""
    found = _level(ref, level, where, (*known, *SWITCHES[level]), strict)
    for name, why in SWITCHES[level].items():
        if flag(f"{where}{level}.{name}", found.pop(name, False)):
            raise PlanError(f"{where}{level}.{name} true must be false: {why}")
    return found


def _on_policy_settings(distillation: Any, enabled: bool, where: str, strict: bool) -> dict[str, Any]:
    """Settings of ``distillation_loss`` that are set and have a choice; the others have their one value."""
    block, place = read(distillation, "distillation_loss"), f"{where}distillation_loss"
    settings = _level(
        distillation, "distillation_loss", where, ON_POLICY_SETTINGS, strict or isinstance(block, Mapping)
    )
    if settings and not enabled:
        raise PlanError(f"{place} is on-policy distillation's; set {where}enabled to true, or drop it")
    for name, (fixed, why) in FIXED.items():
        if (given := settings.pop(name, fixed)) is not fixed:
            must = "false" if fixed is False else "unset (null)"
            raise PlanError(f"{place}.{name} {short_repr(given)} must be {must}: {why}")
    mode = settings.get("loss_mode")
    if isinstance(mode, str) and mode in NOT_OFFERED:
        raise PlanError(f"{place}.loss_mode {mode!r} is not offered: {NOT_OFFERED[mode]}; the default is resopd")
    if "topk" in settings:
        positive(f"{place}.topk", settings["topk"])
    return settings


def build_plan_from_config(config: Any, capabilities: Collection[str] = DECLARABLE) -> DistillationPlan:
    """The plan of ``distillation.distribution_matching``, or of on-policy distillation where that is switched on;
    PlanError for what is missing, unknown or at odds with it."""
    form = read_nested(config)
    if read(read(config, "distillation"), "distribution_matching") is None:
        if form.on_policy and form.capability is None:
            settings = {**form.settings, "opd_top_k": form.on_policy_settings.get("topk")}
            return build_plan(ON_POLICY_RECIPE, settings, capabilities)
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
