"""Validation of plug-ins against the arguments: loss type, model family, rollout engine, roles."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from miles_dmd.config.args import Args
from miles_dmd.config.values import flag_name, kinds
from miles_dmd.errors import ConfigError, MilesDmdError, PlanError
from miles_dmd.plan import DistillationPlan
from miles_dmd.preflight.dotted import require_defined
from miles_dmd.preflight.resolved import ResolvedRun
from miles_dmd.registry import nearest
from miles_dmd.shown import short_repr

if TYPE_CHECKING:
    from miles_dmd.contracts.engine import EngineType
    from miles_dmd.contracts.family import ModelFamily
    from miles_dmd.contracts.loss import LossType


def check_loss_options(args: Args, trainers: Mapping[str, Args], loss_type: LossType) -> None:
    """Apply the loss type's own rules to the run's arguments and to each trainer's. Raises ConfigError."""
    with _asked_of(f"--loss-type {args.loss_type}"):
        for own in (args, *trainers.values()):
            loss_type.check(own)


def check_engine_options(run: ResolvedRun) -> None:
    with _asked_of(f"--rollout-engine {run.args.rollout_engine}"):
        run.engine.check(run.args)


def plan_of(args: Args, loss_type: LossType) -> DistillationPlan:
    """The plan of a run. Raises ConfigError where there is none, or where its groups are not the loss type's."""
    try:
        with _asked_of(f"--loss-type {args.loss_type}"):
            plan = loss_type.plan(args)
    except PlanError as error:
        raise ConfigError(_in_flags(str(error), args)) from error
    if not isinstance(plan, DistillationPlan):
        raise ConfigError(f"--loss-type {args.loss_type}: its plan is {short_repr(plan)}, not a DistillationPlan")
    if loss_type.roles != plan.groups:
        raise ConfigError(
            f"--loss-type {args.loss_type}: its roles {', '.join(loss_type.roles)} are not the groups of its plan, "
            f"{', '.join(plan.groups)}, in order"
        )
    return plan


def check_loss_parts(run: ResolvedRun) -> None:
    """Check each part of the loss type that trainers read: a missing name would show after they have started. Raises
    ConfigError."""
    loss_type, plan, asked = run.loss_type, run.plan, f"--loss-type {run.args.loss_type}"
    trained = dict.fromkeys(role for group in plan.groups for role in plan.trainable_roles_of(group))
    if missing := [role for role in trained if role not in loss_type.objectives]:
        raise ConfigError(f"{asked}: its plan trains {', '.join(missing)}, without an objective; add one to objectives")
    for part in ("objectives", "scorers", "modules"):
        for name, dotted in getattr(loss_type, part).items():
            try:
                require_defined(dotted)
            except ConfigError as error:
                raise ConfigError(f"{asked}: {part}[{name!r}] {error}") from error
    _require_weights(trained, run)
    if bare := [alarm.option for alarm in loss_type.alarms if alarm.option not in kinds(loss_type.options)]:
        raise ConfigError(f"{asked}: its alarm has no threshold; add {bare[0]} to its options")
    if unsaid := [group for group in loss_type.scorers if group not in loss_type.tells]:
        raise ConfigError(f"{asked}: scorers names {unsaid[0]!r}, and tells does not; add the keys of what it gives")
    for role, producers in loss_type.needs.items():
        if role not in plan.role_layout.roles:
            known = ", ".join(plan.role_layout.roles)
            raise ConfigError(f"{asked}: needs names {role!r}, which is no role of its plan; there are {known}")
        for group in producers:
            if group not in plan.groups or group not in loss_type.scorers:
                why = "has no scorer" if group in plan.groups else f"is no group; there are {', '.join(plan.groups)}"
                raise ConfigError(f"{asked}: needs[{role!r}] names {group!r}, which {why}")
            _require_given(asked, loss_type, role, group)


def _require_given(asked: str, loss_type: LossType, role: str, group: str) -> None:
    """Check that ``group``'s scorer gives what ``role`` reads of it. Raises ConfigError."""
    told = loss_type.tells[group]
    for key in loss_type.needs[role][group]:
        if key not in told:
            raise ConfigError(
                f"{asked}: needs[{role!r}][{group!r}] has {key!r}, which the {group} does not tell; it tells "
                f"{', '.join(told)}{nearest(key, told)}"
            )


def _require_weights(trained: Iterable[str], run: ResolvedRun) -> None:
    """Refuse a trained role of which nobody says where its weights come from."""
    for role in trained:
        group = run.plan.group_of(role)
        if role not in run.loss_type.modules and role not in run.roles[group].pipelines:
            raise ConfigError(
                f"--loss-type {run.args.loss_type}: its plan trains {role}, and neither role {group!r} names weights "
                "of it nor the loss type a module; add one to the loss type's modules"
            )


def check_modality(args: Args, loss_type: LossType, family: ModelFamily, engine: EngineType) -> None:
    """Raises ConfigError unless loss type, model family and engine are of one modality."""
    wanted = loss_type.modality
    if family.modality != wanted:
        raise ConfigError(
            f"--model-family {args.model_family} is a family of {family.modality} models, and --loss-type "
            f"{args.loss_type} trains {wanted} models; drop --model-family"
        )
    if wanted not in engine.builds:
        raise ConfigError(
            f"--rollout-engine {args.rollout_engine} samples {' and '.join(engine.builds)} models, and --loss-type "
            f"{args.loss_type} trains {wanted} models; name another engine"
        )


def check_options(run: ResolvedRun) -> None:
    """Apply the rules of the run's modality. Raises ConfigError."""
    with _asked_of(f"--loss-type {run.args.loss_type}"):
        for rule in run.modality.rules:
            rule(run)


@contextlib.contextmanager
def _asked_of(plugin: str) -> Iterator[None]:
    """Whatever a plug-in raises about the arguments is a refusal, in one line."""
    try:
        yield
    except (MilesDmdError, OSError):
        raise
    except (Exception, SystemExit) as error:
        kind = type(error).__name__
        raise ConfigError(f"{plugin} does not take these arguments ({kind}: {error}); change one of its own") from error


def _in_flags(message: str, args: Args) -> str:
    """Name flags where a plan names its settings: the user wrote flags."""
    for name in sorted(kinds(type(args.loss_options)), key=len, reverse=True):
        message = message.replace(name, flag_name(name))
    return f"--loss-type {args.loss_type}: {message}"
