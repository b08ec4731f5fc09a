"""dmd2 whose critic also trains a small head, a fresh module without a checkpoint, in the fake-score phase."""

from dataclasses import replace

from miles_dmd.losses.dmd2 import loss_type as dmd2
from miles_dmd.plan import RoleBinding

ROLES = ("fake_score", "head")


def plan(args):
    plan = dmd2.plan(args)
    layout, schedule = plan.role_layout, plan.update_schedule
    head = RoleBinding("head", "critic", trainable=True, optimizer_key="head")
    both = [phase if phase.kind == "student" else replace(phase, trainable_roles=ROLES) for phase in schedule.phases]
    warmup = [replace(phase, trainable_roles=ROLES) for phase in schedule.warmup_phases]
    return replace(
        plan,
        role_layout=replace(layout, bindings=(*layout.bindings, head)),
        update_schedule=replace(schedule, phases=tuple(both), warmup_phases=tuple(warmup)),
    )


loss_type = replace(
    dmd2,
    plan=plan,
    objectives={**dmd2.objectives, "head": "two_roles.head:loss"},
    modules={"head": "two_roles.head:build"},
    metrics={**dmd2.metrics, "head": ("mean",)},
)
