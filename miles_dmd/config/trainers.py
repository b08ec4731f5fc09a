"""Per-trainer arguments: TrainerConfig (role and overrides) and each group's own copy of Args."""

import copy
import dataclasses
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from miles_dmd import registry
from miles_dmd.config.values import Kind, checked, kinds
from miles_dmd.errors import ConfigError
from miles_dmd.shown import short_repr

if TYPE_CHECKING:
    from miles_dmd.config.args import Args

    AnyArgs = TypeVar("AnyArgs", Args, Namespace)


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """One trainer group: its name, and the arguments that it reads differently."""

    role: str
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.role, str):
            raise ConfigError(f"TrainerConfig: role {short_repr(self.role)} must be text")
        if not isinstance(self.overrides, Mapping) or not all(isinstance(name, str) for name in self.overrides):
            raise ConfigError(
                f"TrainerConfig({short_repr(self.role)}): overrides {short_repr(self.overrides)} must map "
                "names of arguments to values, as in {'lr': 4e-6}"
            )


def compute_trainer_configs(args: "Args | Namespace") -> list[TrainerConfig]:
    """The run's trainers, producers before consumers: the actor alone, unless the loss type has more groups.

    Raises ConfigError for a role that the loss type does not have.
    """
    named = list(getattr(args, "trainers", ()) or ())
    if not dataclasses.is_dataclass(args):
        return named or [TrainerConfig("actor", {})]
    roles = registry.load("losses", args.loss_type).roles
    overrides = {trainer.role: trainer.overrides for trainer in named}
    for role in overrides:
        require_role(role, roles, args.loss_type, f"trainer {role!r}")
    return [TrainerConfig(role, overrides.get(role, {})) for role in roles]


def named_trainers(trainers: Any, known: Mapping[str, Kind]) -> tuple[TrainerConfig, ...]:
    """With overrides of their kinds, ``known``. Raises ConfigError for anything but trainers, and for a role that is
    named twice."""
    if not isinstance(trainers, (list, tuple)) or not all(isinstance(trainer, TrainerConfig) for trainer in trainers):
        raise ConfigError(f"trainers {short_repr(trainers)} must be a list of TrainerConfig(role, overrides)")
    roles = [trainer.role for trainer in trainers]
    if twice := [role for role in roles if roles.count(role) > 1]:
        raise ConfigError(f"trainers names {short_repr(twice[0])} twice; put its overrides together")
    return tuple(TrainerConfig(trainer.role, _of_their_kinds(trainer, known)) for trainer in trainers)


def _of_their_kinds(trainer: TrainerConfig, known: Mapping[str, Kind]) -> Mapping[str, Any]:
    """Names that are none are refused by who makes the trainer's own arguments."""
    return {
        name: checked(known[name], value, f"trainer {trainer.role!r}: {name}") if name in known else value
        for name, value in trainer.overrides.items()
    }


def compute_trainer_args(args: "AnyArgs", trainer: TrainerConfig) -> "AnyArgs":
    """A deep copy of ``args`` with the trainer's overrides; ``args`` itself is left as it is.

    What follows from other arguments is a property, so it follows an override too. Raises ConfigError for an unknown
    name, and, for ``Args``, for a value of the wrong kind.
    """
    if not isinstance(trainer, TrainerConfig):
        raise ConfigError(f"trainer {short_repr(trainer)} must be a TrainerConfig(role, overrides)")
    own = copy.deepcopy(args)
    overrides = copy.deepcopy(dict(trainer.overrides))
    if dataclasses.is_dataclass(own):
        require_role(trainer.role, registry.load("losses", args.loss_type).roles, args.loss_type, "trainer")
        return _replaced(own, overrides, f"trainer {trainer.role!r}") if overrides else own
    for name in overrides:
        _require_known(name, vars(own), f"trainer {trainer.role!r}")
    vars(own).update(overrides)
    return own


def trainer_args(args: "Args") -> "dict[str, Args]":
    """group -> its own arguments, producers before consumers.

    A run has one teacher: where it follows from --hf-checkpoint it is that of the run, also for a trainer that starts
    from another one. It follows for roles that read ``teacher_path``; the others name it, or a server holds it.
    """
    configs = compute_trainer_configs(args)
    read = {name for config in configs for name in registry.load("roles", config.role).pipelines.values()}
    run = dataclasses.replace(args, teacher_checkpoint=args.teacher_path) if "teacher_path" in read else args
    return {config.role: compute_trainer_args(run, config) for config in configs}


def require_role(role: str, roles: tuple[str, ...], loss_type: str, where: str) -> None:
    """Raises ConfigError where ``loss_type`` has no group of that name."""
    if role not in roles:
        raise ConfigError(
            f"{where}: loss type {loss_type!r} has no group {role!r}; "
            f"its groups are {', '.join(roles)}{registry.nearest(role, roles)}"
        )


def _replaced(args: "Args", overrides: Mapping[str, Any], who: str) -> "Args":
    """The loss type's options may be overridden by name, like any other argument."""
    of_args, of_loss = kinds(type(args)), kinds(type(args.loss_options))
    for name in overrides:
        _require_known(name, {**of_args, **of_loss}, who)
    values = {name: checked({**of_loss, **of_args}[name], value, f"{who}: {name}") for name, value in overrides.items()}
    options = {name: value for name, value in values.items() if name not in of_args}
    own = {name: value for name, value in values.items() if name in of_args}
    return dataclasses.replace(args, **own, loss_options=dataclasses.replace(args.loss_options, **options))


def _require_known(name: str, known: Mapping[str, Any], who: str) -> None:
    if name not in known:
        raise ConfigError(f"{who} overrides {name!r}, which is no argument{registry.nearest(name, known)}")
