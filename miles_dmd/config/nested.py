"""Nested form of a preset, translated once into arguments.

algorithm: {trainer_type: distillation}
actor_rollout_ref: {model: {path: DIR}}
distillation:
  enabled: false
  distribution_matching: {recipe: dmd2, fake_update_ratio: 5, rollout_strategy: ode_euler, fake_lr: 4.0e-6}
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles_dmd.errors import ConfigError
from miles_dmd.plan import TRAINER_TYPES, DistillationPlan
from miles_dmd.registry import nearest
from miles_dmd.shown import shown

DEFAULT_RECIPE = "dmd2"
KEYS = ("algorithm", "actor_rollout_ref", "distillation")
SOLVERS = {"consistency_renoise": "renoise", "backward_simulated": "renoise", "ode_euler": "euler"}
"""rollout_strategy -> --solver. DMD2's backward simulation is sampling by re-noising."""
ONLY = {
    "profile": "distribution_only",
    "data_mode": "prompts",
    "export_role": "student_ema",
    "role_storage": "actor_critic",
}
"""Settings of which one value can run."""
SHARED = {
    "recipe": "loss_type",
    "model_path": "hf_checkpoint",
    "rollout_strategy": "solver",
    **{name: name for name in ("fake_update_ratio", "fake_warmup_cycles", "ema_decay", "ema_start_step")},
}
"""setting -> argument of all trainers."""
OF_TRAINER = {
    "student_micro_batch_size": ("actor", "micro_batch_size"),
    "actor_model_path": ("actor", "hf_checkpoint"),
    "critic_model_path": ("critic", "hf_checkpoint"),
    "fake_micro_batch_size": ("critic", "micro_batch_size"),
    "fake_lr": ("critic", "lr"),
    "fake_weight_decay": ("critic", "weight_decay"),
    "fake_clip_grad": ("critic", "clip_grad"),
    "fake_lr_scheduler": ("critic", "lr_scheduler"),
}
"""setting -> (trainer, argument of that one alone)."""


@dataclass(frozen=True, slots=True)
class Nested:
    """What the nested keys of a document ask for."""

    args: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """trainer -> arguments."""
    capability: str | None = None
    """What the trainer type requires of the loss type's plan; None where the loss type decides."""
    on_policy: bool = False
    """distillation.enabled, the switch of on-policy distillation."""
    recipe: str | None = None
    """As it is written; its default is not."""
    where: str = ""


NOTHING = Nested()


def translate(document: Mapping[str, Any], where: str) -> Nested:
    """Raises ConfigError for a key or a value that has no meaning here."""
    algorithm = mapping(document.get("algorithm"), f"{where}: algorithm", ("trainer_type",))
    block = mapping(document.get("distillation"), f"{where}: distillation", ("enabled", "distribution_matching"))
    has_settings = block.get("distribution_matching") is not None
    settings = _settings(block.get("distribution_matching"), f"{where}: distillation.distribution_matching")
    capability = _capability(algorithm.get("trainer_type") or ("distillation" if has_settings else None), where)
    args = _checkpoint(document, where) | {SHARED[name]: value for name, value in settings.items() if name in SHARED}
    if capability is not None:
        args.setdefault("loss_type", DEFAULT_RECIPE)
    overrides: dict[str, dict[str, Any]] = {}
    for name, (role, argument) in OF_TRAINER.items():
        if name in settings:
            overrides.setdefault(role, {})[argument] = settings[name]
    enabled = block.get("enabled")
    if not isinstance(enabled, bool | None):
        raise ConfigError(f"{where}: distillation.enabled {shown(enabled)} must be true or false")
    return Nested(args, overrides, capability, bool(enabled), settings.get("recipe"), where)


def check_nested(nested: Nested, loss_name: str, plan: DistillationPlan) -> None:
    """Raises ConfigError where the chosen loss type is not of the kind that the document asks for."""
    if nested.recipe is not None and nested.recipe != loss_name:
        raise ConfigError(
            f"--loss-type {loss_name} disagrees with distribution_matching.recipe {nested.recipe!r} of {nested.where}; "
            "drop one of the two"
        )
    if nested.capability is not None and nested.capability not in plan.required_capabilities:
        raise ConfigError(
            f"--loss-type {loss_name} disagrees with algorithm.trainer_type 'distillation' of {nested.where}, which is "
            f"{nested.capability.replace('_', ' ')}; drop one of the two"
        )
    if nested.on_policy and "distribution_matching" in plan.required_capabilities:
        raise ConfigError(
            f"{nested.where}: distillation.enabled true turns on-policy distillation on, and must be false with "
            f"distribution matching (--loss-type {loss_name})"
        )


def mapping(value: Any, where: str, known: Sequence[str] | None = None) -> Mapping[str, Any]:
    """``value``, or nothing for null. Raises ConfigError for another type, or for a key that is not known."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{where} must hold names and values (name: value), not {type(value).__name__}")
    for key in value:
        if not isinstance(key, str):
            raise ConfigError(f"{where}: key {shown(key)} must be a name")
        if known is not None and key not in known:
            raise ConfigError(f"{where}: unknown key {shown(key)}; there are {', '.join(known)}{nearest(key, known)}")
    return value


def _capability(trainer_type: Any, where: str) -> str | None:
    if trainer_type is None:
        return None
    if not isinstance(trainer_type, str) or trainer_type not in TRAINER_TYPES:
        raise ConfigError(
            f"{where}: algorithm.trainer_type {shown(trainer_type)} is not among {', '.join(TRAINER_TYPES)}; "
            "leave it out, and the loss type decides"
        )
    return TRAINER_TYPES[trainer_type]


def _checkpoint(document: Mapping[str, Any], where: str) -> dict[str, Any]:
    outer = mapping(document.get("actor_rollout_ref"), f"{where}: actor_rollout_ref", ("model",))
    model = mapping(outer.get("model"), f"{where}: actor_rollout_ref.model", ("path",))
    return {"hf_checkpoint": model["path"]} if model.get("path") is not None else {}


def _settings(block: Any, where: str) -> dict[str, Any]:
    """The block's settings in our words; null is the default."""
    given = mapping(block, where, (*SHARED, *OF_TRAINER, *ONLY))
    settings = {name: value for name, value in given.items() if value is not None}
    for name in settings.keys() & ONLY.keys():
        if settings[name] != ONLY[name]:
            raise ConfigError(f"{where}.{name} {shown(settings[name])} cannot run here; there is {ONLY[name]!r}")
    if "rollout_strategy" in settings:
        settings["rollout_strategy"] = _solver(settings["rollout_strategy"], where)
    return settings


def _solver(value: Any, where: str) -> str:
    if not isinstance(value, str) or value not in SOLVERS:
        raise ConfigError(
            f"{where}.rollout_strategy {shown(value)} cannot run here; there are {', '.join(SOLVERS)}"
            f"{nearest(str(value), SOLVERS)}"
        )
    return SOLVERS[value]
