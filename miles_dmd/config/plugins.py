"""What do the run's plug-ins say of its arguments: loss type, model family, rollout engine, roles?"""

import contextlib
from collections.abc import Iterator

from miles_dmd import registry
from miles_dmd.config.args import Args
from miles_dmd.config.flags import flag_name
from miles_dmd.config.trainers import compute_trainer_args, compute_trainer_configs
from miles_dmd.config.values import kinds
from miles_dmd.errors import ConfigError, MilesDmdError, PlanError
from miles_dmd.plan import DistillationPlan
from miles_dmd.shown import shown


def check_plugins(args: Args) -> None:
    registry.load("models", args.model_family)
    registry.load("engines", args.rollout_engine)
    for trainer in compute_trainer_configs(args):
        registry.load("roles", trainer.role)


def check_loss_options(args: Args) -> None:
    loss_type = registry.load("losses", args.loss_type)
    with _asked_of(f"--loss-type {args.loss_type}"):
        loss_type.check(args)
        for trainer in compute_trainer_configs(args):
            loss_type.check(compute_trainer_args(args, trainer))


def check_engine_options(args: Args) -> None:
    with _asked_of(f"--rollout-engine {args.rollout_engine}"):
        registry.load("engines", args.rollout_engine).check(args)


def check_plan(args: Args) -> None:
    try:
        with _asked_of(f"--loss-type {args.loss_type}"):
            plan = registry.load("losses", args.loss_type).plan(args)
    except PlanError as error:
        raise ConfigError(_in_flags(str(error), args)) from error
    if not isinstance(plan, DistillationPlan):
        raise ConfigError(f"--loss-type {args.loss_type}: its plan is {shown(plan)}, not a DistillationPlan")
    groups = tuple(trainer.role for trainer in compute_trainer_configs(args))
    if groups != plan.groups:
        raise ConfigError(
            f"--loss-type {args.loss_type}: its roles {', '.join(groups)} are not the groups of its plan, "
            f"{', '.join(plan.groups)}, in order"
        )


@contextlib.contextmanager
def _asked_of(plugin: str) -> Iterator[None]:
    """Whatever a plug-in raises about the arguments is a refusal, in one line."""
    try:
        yield
    except (MilesDmdError, OSError):
        raise
    except Exception as error:
        kind = type(error).__name__
        raise ConfigError(f"{plugin} does not take these arguments ({kind}: {error}); change one of its own") from error


def _in_flags(message: str, args: Args) -> str:
    """A plan speaks of its settings; the user wrote flags."""
    for name in sorted(kinds(type(args.loss_options)), key=len, reverse=True):
        message = message.replace(name, flag_name(name))
    return f"--loss-type {args.loss_type}: {message}"
