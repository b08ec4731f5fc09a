"""DistillationPlan: one immutable value, from which trainers, batches, optimizer horizons and checkpoints derive."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_dmd.errors import PlanError
from miles_dmd.plan.frozen import FrozenDict, assign, fingerprint, immutable
from miles_dmd.plan.layout import ExportSpec, RoleLayoutSpec, validate_export_role
from miles_dmd.plan.schedule import UpdateSchedule
from miles_dmd.validators import count, instance, mapping, sequence, text

DataRequirements = Mapping[str, Any]
ObjectiveSpec = Mapping[str, Any]
RolloutSpec = Mapping[str, Any]
InitializationSpec = Mapping[str, Any]

DISTRIBUTION_MATCHING_ROLES = ("student", "student_ema", "teacher_score", "fake_score")
_MANDATORY = {"data_requirements": "mode", "objective": "name", "rollout": "strategy", "initialization": "stage"}


@immutable
class DistillationPlan:
    """``objective["roles"]`` names the roles that the objective reads; without it, those of distribution matching."""

    name: str
    version: int
    role_layout: RoleLayoutSpec
    data_requirements: DataRequirements
    objective: ObjectiveSpec
    rollout: RolloutSpec
    initialization: InitializationSpec
    update_schedule: UpdateSchedule
    export: ExportSpec = ExportSpec()
    required_capabilities: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name in _MANDATORY:
            values = mapping(f"DistillationPlan.{name}", getattr(self, name))
            assign(self, **{name: FrozenDict(values, path=name)})
        capabilities = sequence("DistillationPlan.required_capabilities", self.required_capabilities, str)
        assign(self, required_capabilities=frozenset(capabilities))
        validate_distillation_plan(self)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the content, for checkpoints: a run resumes only under the plan that it was saved under."""
        return fingerprint(self)

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the physical groups, scoring groups before those they serve: the order of trainers."""
        return tuple(group.name for group in self.role_layout.groups)

    def group_of(self, role: str) -> str:
        return self.role_layout.binding(role).group

    def roles_of(self, group: str) -> tuple[str, ...]:
        if group not in self.groups:
            raise PlanError(f"no role group {group!r} in plan {self.name!r}; it has {', '.join(self.groups)}")
        return self.role_layout.roles_of(group)

    def trainable_roles_of(self, group: str) -> tuple[str, ...]:
        return tuple(role for role in self.roles_of(group) if self.role_layout.binding(role).trainable)

    def trainable_role(self, group: str) -> str | None:
        """The one role that trains in ``group``; None where all are frozen."""
        roles = self.trainable_roles_of(group)
        if len(roles) > 1:
            raise PlanError(f"group {group!r} trains {len(roles)} roles, {', '.join(roles)}; ask trainable_roles_of")
        return roles[0] if roles else None

    @property
    def averaged_role(self) -> str | None:
        """The role whose moving average the plan keeps; None where it keeps none."""
        return "student" if "student_ema" in self.role_layout.roles else None

    def optimizer_steps(self, num_student_steps: int) -> dict[str, int]:
        """Horizon of every trainable role's optimizer: n for the student, K (W + n) for the fake score."""
        cycles = self.update_schedule.warmup_cycles + count("num_student_steps", num_student_steps)
        steps = self.update_schedule.counters_after(cycles).optimizer_steps
        return {role: steps.get(role, 0) for role in self.role_layout.trainable_roles}


def validate_distillation_plan(plan: DistillationPlan) -> None:
    """Raises PlanError for a plan whose parts contradict each other; also called by ``dataclasses.replace``."""
    text("DistillationPlan.name", plan.name)
    count("DistillationPlan.version", plan.version, 1)
    layout = instance("DistillationPlan.role_layout", plan.role_layout, RoleLayoutSpec)
    instance("DistillationPlan.update_schedule", plan.update_schedule, UpdateSchedule)
    for name, key in _MANDATORY.items():
        text(f"{name}[{key!r}]", getattr(plan, name).get(key) or "")
    if bare := [group.name for group in layout.groups if not group.model_ref]:
        raise PlanError(f"role groups {bare} have no model_ref; pass model_path, the directory of the pretrained model")
    needed = sequence("objective['roles']", plan.objective.get("roles", DISTRIBUTION_MATCHING_ROLES), str)
    if missing := [role for role in dict.fromkeys(("student", *needed)) if role not in layout.roles]:
        raise PlanError(f"plan {plan.name!r} lacks the required roles {missing}; bound are {', '.join(layout.roles)}")
    validate_export_role(instance("DistillationPlan.export", plan.export, ExportSpec), layout.roles)
    _check_phases(plan)


def _check_phases(plan: DistillationPlan) -> None:
    layout, schedule = plan.role_layout, plan.update_schedule
    for phase in (*schedule.phases, *schedule.warmup_phases):
        if frozen := [role for role in phase.trainable_roles if role not in layout.trainable_roles]:
            raise PlanError(
                f"a {phase.kind} phase trains {frozen}, which are not trainable bindings; "
                f"trainable are {', '.join(layout.trainable_roles) or 'none'}"
            )
        if phase.update_ema and "student_ema" not in layout.roles:
            raise PlanError("a phase with update_ema needs the role student_ema; bind it or drop update_ema")
