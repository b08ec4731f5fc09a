"""Preflight: a plan that this run's plug-ins would not obey is refused."""

from typing import Any

from miles_dmd import registry
from miles_dmd.config.args import Args
from miles_dmd.config.values import flag_name
from miles_dmd.errors import ConfigError, NotBuilt
from miles_dmd.plan import Support, require_runnable
from miles_dmd.preflight.resolved import ResolvedRun
from miles_dmd.shown import short_repr


def check_plan_is_obeyed(run: ResolvedRun) -> None:
    """Raises ConfigError for what the loss type's plan says and the run would not do."""
    args, plan, engine = run.args, run.plan, run.engine
    capabilities = run.loss_type.capabilities | run.family.capabilities | engine.capabilities
    try:
        require_runnable(plan, Support(capabilities, _played(run)))
    except NotBuilt as error:
        plugins = f"--loss-type {args.loss_type} with --rollout-engine {args.rollout_engine}"
        raise ConfigError(f"{plugins} and --model-family {args.model_family}: {error}") from error
    strategy = plan.rollout["strategy"]
    _require_arguments({**engine.rollouts[strategy], **plan.rollout}, args)


def _played(run: ResolvedRun) -> frozenset[str]:
    """Rollout strategies that the engine plays for this modality; those of another one mean nothing to its samples."""
    played, own = frozenset(run.engine.rollouts), run.modality.strategies
    if run.plan.rollout["strategy"] in own:
        return played
    return played - {name for other in registry.names("modalities") for name in _strategies(other)} | (played & own)


def _strategies(modality: str) -> frozenset[str]:
    return registry.load("modalities", modality).strategies


def _require_arguments(rollout: dict[str, Any], args: Args) -> None:
    """Sampling follows the arguments, so they must be those of the plan's ``rollout``."""
    strategy = rollout.pop("strategy")
    for name, planned in rollout.items():
        given = getattr(args, name, getattr(args.modality_options, name, None))
        if given != planned:
            raise ConfigError(
                f"{flag_name(name)} {short_repr(given)} is not what the plan of --loss-type {args.loss_type} samples "
                f"with: its rollout strategy {strategy} needs {short_repr(planned)}; pass {flag_name(name)} {planned}"
            )


def check_models(run: ResolvedRun) -> None:
    """Raises ConfigError where trainers build other models than the plan's: they follow role and arguments."""
    plan, asked = run.plan, f"--loss-type {run.args.loss_type}: its plan"
    for (role, own), group in zip(run.trainers.items(), plan.role_layout.groups, strict=True):
        sources = run.roles[role].pipelines
        built = {*sources, *run.loss_type.modules, "student_ema"}
        if absent := [role for role in plan.roles_of(group.name) if role not in built]:
            raise ConfigError(
                f"{asked} has {', '.join(absent)} in group {group.name!r}, which builds {', '.join(sources)}; "
                "bind the role to another group"
            )
        named = (getattr(own, argument) for argument in sources.values())
        paths = dict.fromkeys(path for path in named if path is not None)  # a server holds the others
        if paths and group.model_ref not in paths:
            raise ConfigError(
                f"{asked} has group {group.name!r} start from model_ref {group.model_ref}, and its trainer reads "
                f"{', '.join(map(str, paths))}; build the plan from the arguments"
            )
