"""Arguments of the nested way to write a preset.

algorithm: {trainer_type: distillation}
actor_rollout_ref: {model: {path: DIR}}
distillation:
  enabled: false
  distribution_matching: {recipe: dmd2, fake_update_ratio: 5, rollout_strategy: ode_euler, fake_lr: 4.0e-6}

or, of on-policy distillation:

actor_rollout_ref: {model: {path: DIR, use_fused_kernels: false}, actor: {use_torch_compile: false}}
distillation:
  enabled: true
  distillation_loss: {loss_mode: resopd, topk: 4, use_policy_gradient: false, loss_max_clamp: null}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from miles_dmd import registry
from miles_dmd.errors import ConfigError
from miles_dmd.plan import DistillationPlan
from miles_dmd.plan.configuration import DEFAULT_RECIPE, ON_POLICY_LOSS, UNASKED, NestedForm, mapping, read_nested
from miles_dmd.registry import nearest
from miles_dmd.shown import short_repr

if TYPE_CHECKING:
    from miles_dmd.contracts.loss import NestedSetting

__all__ = ["KEYS", "NOTHING", "Nested", "check_nested", "mapping", "translate"]

KEYS = ("algorithm", "actor_rollout_ref", "distillation")
OF_EVERY_LOSS = {"recipe": "loss_type", "model_path": "hf_checkpoint"}
"""setting -> argument."""


def settings_that_run(loss_name: str = DEFAULT_RECIPE) -> Mapping[str, NestedSetting]:
    """Settings that can run, as the loss type declares them."""
    return registry.load("losses", loss_name).nested


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
    loss_name = DEFAULT_RECIPE if form.capability is not None else ON_POLICY_LOSS if form.on_policy else None
    args: dict[str, Any] = {} if loss_name is None else {"loss_type": loss_name}
    overrides: dict[str, dict[str, Any]] = {}
    for block, default, settings in (
        ("distribution_matching", DEFAULT_RECIPE, form.settings),
        ("distillation_loss", ON_POLICY_LOSS, form.on_policy_settings),
    ):
        for name, value in settings.items():
            setting = settings_that_run(default).get(name)
            if name in OF_EVERY_LOSS:
                args[OF_EVERY_LOSS[name]] = value
            elif setting is None or not setting.argument:
                args |= _chosen(name, value, setting.choices if setting else {}, f"{where}: distillation.{block}")
            elif setting.role:
                overrides.setdefault(setting.role, {})[setting.argument] = value
            else:
                args[setting.argument] = value
    return Nested(args, overrides, form)


def _chosen(name: str, value: Any, known: Mapping[str, Mapping[str, Any]], where: str) -> Mapping[str, Any]:
    if not isinstance(value, str) or value not in known:
        raise ConfigError(
            f"{where}.{name} {short_repr(value)} cannot run here; there are {', '.join(known) or 'none'}"
            f"{nearest(str(value), known)}"
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
