"""Arguments of the nested way to write a preset.

algorithm: {trainer_type: distillation}
actor_rollout_ref: {model: {path: DIR}}
distillation:
  enabled: false
  distribution_matching: {recipe: dmd2, fake_update_ratio: 5, rollout_strategy: ode_euler, fake_lr: 4.0e-6}
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from miles_dmd.errors import ConfigError
from miles_dmd.plan import DistillationPlan
from miles_dmd.plan.configuration import DEFAULT_RECIPE, UNASKED, NestedForm, mapping, read_nested
from miles_dmd.registry import nearest
from miles_dmd.sampling.strategies import FEW_STEP
from miles_dmd.shown import shown

__all__ = ["KEYS", "NOTHING", "Nested", "check_nested", "mapping", "translate"]

KEYS = ("algorithm", "actor_rollout_ref", "distillation")
SHARED = {
    "recipe": "loss_type",
    "model_path": "hf_checkpoint",
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
CHOICES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "profile": {"distribution_only": {}},
    "data_mode": {"prompts": {}},
    "export_role": {"student_ema": {}},
    "role_storage": {"actor_critic": {}},
    "rollout_strategy": {name: arguments for name, arguments in FEW_STEP.items() if "solver" in arguments},
}
"""setting -> value that can run -> arguments that say the same. Other settings belong to recipes that cannot run."""


@dataclass(frozen=True, slots=True)
class Nested:
    """The nested keys of a document, as arguments."""

    args: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """trainer -> arguments."""
    form: NestedForm = UNASKED


NOTHING = Nested()


def translate(document: Mapping[str, Any], where: str) -> Nested:
    """Raises ConfigError for a key or a value that has no meaning here."""
    form = read_nested(document, f"{where}: ", strict=True)
    args: dict[str, Any] = {} if form.capability is None else {"loss_type": DEFAULT_RECIPE}
    overrides: dict[str, dict[str, Any]] = {}
    for name, value in form.settings.items():
        if name in SHARED:
            args[SHARED[name]] = value
        elif name in OF_TRAINER:
            role, argument = OF_TRAINER[name]
            overrides.setdefault(role, {})[argument] = value
        else:
            args |= _chosen(name, value, where)
    return Nested(args, overrides, form)


def _chosen(name: str, value: Any, where: str) -> Mapping[str, Any]:
    known = CHOICES.get(name, {})
    if not isinstance(value, str) or value not in known:
        raise ConfigError(
            f"{where}: distillation.distribution_matching.{name} {shown(value)} cannot run here; there are "
            f"{', '.join(known) or 'none'}{nearest(str(value), known)}"
        )
    return known[value]


def check_nested(nested: Nested, loss_name: str, plan: DistillationPlan) -> None:
    """Raises ConfigError where the chosen loss type is not of the kind that the document asks for."""
    if (recipe := nested.form.settings.get("recipe", loss_name)) != loss_name:
        raise ConfigError(
            f"--loss-type {loss_name} disagrees with {nested.form.where}distribution_matching.recipe {recipe!r}; "
            "drop one of the two"
        )
    nested.form.require_agreement(plan, f"--loss-type {loss_name}")
