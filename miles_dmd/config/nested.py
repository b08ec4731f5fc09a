"""The nested way to write a preset, translated once into arguments.

    algorithm: {trainer_type: distillation}
    actor_rollout_ref: {model: {path: DIR}}
    distillation:
      enabled: false
      distribution_matching: {recipe: dmd2, fake_update_ratio: 5, rollout_strategy: ode_euler}
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles_dmd.errors import ConfigError
from miles_dmd.registry import nearest

KEYS = ("algorithm", "actor_rollout_ref", "distillation")
TRAINER_TYPES = ("distillation",)
SOLVERS = {"consistency_renoise": "renoise", "backward_simulated": "renoise", "ode_euler": "euler"}
"""rollout_strategy -> --solver. DMD2's backward simulation is sampling by re-noising."""
ONLY = {
    "profile": "distribution_only",
    "data_mode": "prompts",
    "export_role": "student_ema",
    "role_storage": "actor_critic",
}
"""Settings of distribution_matching that have one value here; null stands for it."""


@dataclass(frozen=True, slots=True)
class Route:
    """What a preset says of the kind of distillation, before its loss type is known."""

    distribution_matching: bool = False
    """It asks for distribution matching."""
    on_policy: bool = False
    """It sets distillation.enabled, the switch of on-policy distillation."""
    recipe: str | None = None
    where: str = ""


ANY_ROUTE = Route()


def translate(document: Mapping[str, Any], where: str) -> tuple[dict[str, Any], Route]:
    """(arguments, route) of the document's nested keys. Raises ConfigError."""
    algorithm = mapping(document.get("algorithm"), f"{where}: algorithm", ("trainer_type",))
    distillation = mapping(
        document.get("distillation"), f"{where}: distillation", ("enabled", "distribution_matching")
    )
    settings = dict(mapping(distillation.get("distribution_matching"), f"{where}: distillation.distribution_matching"))
    trainer_type = _trainer_type(algorithm, where)
    asks = trainer_type is not None or distillation.get("distribution_matching") is not None
    args = {**_checkpoint(document, where), **_settings(settings, where)}
    if asks:
        args.setdefault("loss_type", "dmd2")
    return args, Route(asks, _enabled(distillation, where), settings.get("recipe"), where)


def check_route(route: Route, loss_name: str, matches_distributions: bool) -> None:
    """Raises ConfigError where the chosen loss type is not of the kind that the preset asks for."""
    if route.recipe is not None and route.recipe != loss_name:
        raise ConfigError(
            f"--loss-type {loss_name} disagrees with distribution_matching.recipe {route.recipe!r} of {route.where}; "
            "drop one of them"
        )
    if route.distribution_matching and not matches_distributions:
        raise ConfigError(
            f"--loss-type {loss_name} disagrees with {route.where}, whose algorithm.trainer_type 'distillation' means "
            "distribution matching; drop one of them"
        )
    if route.on_policy and matches_distributions:
        raise ConfigError(
            f"{route.where}: distillation.enabled true is the switch of on-policy distillation and must be false with "
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
            raise ConfigError(f"{where}: key {key!r} must be a name")
        if known is not None and key not in known:
            raise ConfigError(f"{where}: unknown key {key!r}; there are {', '.join(known)}{nearest(key, known)}")
    return value


def _trainer_type(algorithm: Mapping[str, Any], where: str) -> str | None:
    value = algorithm.get("trainer_type")
    if value is not None and value not in TRAINER_TYPES:
        raise ConfigError(
            f"{where}: algorithm.trainer_type {value!r} is not among {', '.join(TRAINER_TYPES)}; "
            "leave it out, and the loss type decides"
        )
    return value


def _enabled(distillation: Mapping[str, Any], where: str) -> bool:
    value = distillation.get("enabled")
    if not isinstance(value, bool | None):
        raise ConfigError(f"{where}: distillation.enabled {value!r} must be true or false")
    return bool(value)


def _checkpoint(document: Mapping[str, Any], where: str) -> dict[str, Any]:
    outer = mapping(document.get("actor_rollout_ref"), f"{where}: actor_rollout_ref", ("model",))
    model = mapping(outer.get("model"), f"{where}: actor_rollout_ref.model", ("path",))
    return {"hf_checkpoint": model["path"]} if model.get("path") is not None else {}


def _settings(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Names that arguments have are passed on; null means the default."""
    where = f"{where}: distillation.distribution_matching"
    args = {}
    for name, value in settings.items():
        if value is None:
            continue
        if name in ONLY:
            if value != ONLY[name]:
                raise ConfigError(f"{where}.{name} {value!r} cannot run here; there is {ONLY[name]!r}")
        elif name == "rollout_strategy":
            args["solver"] = _solver(value, where)
        else:
            args["loss_type" if name == "recipe" else name] = value
    return args


def _solver(value: Any, where: str) -> str:
    if not isinstance(value, str) or value not in SOLVERS:
        raise ConfigError(
            f"{where}.rollout_strategy {value!r} cannot run here; there are {', '.join(SOLVERS)}"
            f"{nearest(str(value), SOLVERS)}"
        )
    return SOLVERS[value]
