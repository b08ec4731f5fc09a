"""Names of the metrics that a run will write, from its plan, loss type and flags."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from miles_dmd import registry
from miles_dmd.config.alarms import alarm_thresholds
from miles_dmd.config.args import Args
from miles_dmd.observe.alarms import PREFIX
from miles_dmd.observe.metrics import OF_A_CYCLE, OF_EVERY_ROLE, OF_EVERY_STEP, keys_over_repeats
from miles_dmd.observe.spans import OTHER, time_metrics
from miles_dmd.plan import DistillationPlan, UpdatePhaseSpec

OF_GRIDS = ("samples/diversity", "samples/saturation")


def metric_names(args: Args) -> set[str]:
    """Of a cycle with a student step. A loss type of somebody's own has those that its ``metrics`` declare."""
    plan = registry.load("losses", args.loss_type).plan(args)
    names = {*OF_A_CYCLE, *(name for phase in plan.update_schedule.phases for name in _of_phase(phase, plan, args))}
    names |= time_metrics(dict.fromkeys((*span_names(plan), "pictures", OTHER), 0.0)).keys()
    if args.sample_prompts:
        names |= set(OF_GRIDS)
    for alarm, threshold in alarm_thresholds(args).items():
        if threshold > 0 and (args.sample_prompts or alarm.metric not in OF_GRIDS):
            names |= {alarm.metric, PREFIX + alarm.name}
    return names


def span_names(plan: DistillationPlan) -> tuple[str, ...]:
    """Spans of a cycle, as its time table lists them."""
    training = (f"{group} train" for group in plan.groups if plan.trainable_roles_of(group))
    return ("rollout", "score", *training, "weight sync", "save")


def _of_phase(phase: UpdatePhaseSpec, plan: DistillationPlan, args: Args) -> Iterator[str]:
    roles = phase.trainable_roles
    group = plan.group_of(roles[0])
    for name in dict.fromkeys((*OF_EVERY_STEP, *_of_objectives(roles, args), *_of_roles(roles, plan))):
        yield from keys_over_repeats(name if "/" in name else f"{group}/{name}", phase.repeats)


def _of_objectives(roles: Sequence[str], args: Args) -> Iterator[str]:
    """What objectives tell; where several are called in a phase, under the roles that each trains."""
    loss_type = registry.load("losses", args.loss_type)
    for served in loss_type.objectives_of(roles).values():
        prefix = loss_type.metric_prefix(served, roles)
        for name in ("loss", *(name for role in served for name in loss_type.metrics.get(role, ()))):
            yield name if "/" in name else prefix + name


def _of_roles(roles: Sequence[str], plan: DistillationPlan) -> Iterator[str]:
    """What each role's step tells; where several train in its group, under its name."""
    alone = len(plan.trainable_roles_of(plan.group_of(roles[0]))) == 1
    for role in roles:
        for name in (*OF_EVERY_ROLE, *(("ema_decay",) if role == plan.averaged_role else ())):
            yield name if alone else f"{role}/{name}"
