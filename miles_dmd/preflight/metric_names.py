"""Names of the metrics that a run will write, from its plan, loss type and flags."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from miles_dmd.observe.alarms import PREFIX
from miles_dmd.observe.metrics import OF_A_CYCLE, OF_EVERY_ROLE, OF_EVERY_STEP, keys_over_repeats
from miles_dmd.observe.spans import OTHER, time_metrics
from miles_dmd.plan import DistillationPlan, UpdatePhaseSpec
from miles_dmd.preflight.resolved import ResolvedRun

if TYPE_CHECKING:
    from miles_dmd.contracts.loss import LossType


def metric_names(run: ResolvedRun) -> set[str]:
    """Metrics of a cycle with a student step. A loss type of somebody's own has those that its ``metrics`` declare."""
    plan, shown = run.plan, run.args.sample_prompts > 0
    names = {*OF_A_CYCLE, *(name for phase in plan.update_schedule.phases for name in _of_phase(phase, run))}
    names |= time_metrics(dict.fromkeys((*span_names(plan), "pictures", OTHER), 0.0)).keys()
    if shown:
        names |= set(run.modality.metrics)
    for alarm, threshold in run.alarms.items():
        if threshold > 0 and (shown or alarm.metric not in run.modality.metrics):
            names |= {alarm.metric, PREFIX + alarm.name}
    return names


def span_names(plan: DistillationPlan) -> tuple[str, ...]:
    """Spans of a cycle, as its time table lists them."""
    training = (f"{group} train" for group in plan.groups if plan.trainable_roles_of(group))
    return ("rollout", "score", *training, "weight sync", "save")


def _of_phase(phase: UpdatePhaseSpec, run: ResolvedRun) -> Iterator[str]:
    roles = phase.trainable_roles
    group = run.plan.group_of(roles[0])
    for name in dict.fromkeys((*OF_EVERY_STEP, *_of_objectives(roles, run.loss_type), *_of_roles(roles, run.plan))):
        yield from keys_over_repeats(name if "/" in name else f"{group}/{name}", phase.repeats)


def _of_objectives(roles: Sequence[str], loss_type: LossType) -> Iterator[str]:
    """Metrics of objectives; where several are called in a phase, under the roles that each trains."""
    for served in loss_type.objectives_of(roles).values():
        prefix = loss_type.metric_prefix(served, roles)
        for name in ("loss", *(name for role in served for name in loss_type.metrics.get(role, ()))):
            yield name if "/" in name else prefix + name


def _of_roles(roles: Sequence[str], plan: DistillationPlan) -> Iterator[str]:
    """Metrics of each role's step; where several train in its group, under its name."""
    alone = len(plan.trainable_roles_of(plan.group_of(roles[0]))) == 1
    for role in roles:
        for name in (*OF_EVERY_ROLE, *(("ema_decay",) if role == plan.averaged_role else ())):
            yield name if alone else f"{role}/{name}"
