"""A plan is checked as a whole, also when one part is replaced, and answers what its users derive from it."""

from dataclasses import replace

import pytest

from miles_dmd.errors import PlanError
from miles_dmd.plan import (
    DistillationPlan,
    ExportSpec,
    RoleBinding,
    RoleGroupSpec,
    RoleLayoutSpec,
    UpdatePhaseSpec,
    UpdateSchedule,
    validate_distillation_plan,
)

STUDENT_PHASE = UpdatePhaseSpec("student", trainable_roles=("student",))


def without(layout, role):
    return replace(layout, bindings=[binding for binding in layout.bindings if binding.role != role])


REFUSALS = {
    "empty name": (lambda p: {"name": ""}, "DistillationPlan.name must not be empty"),
    "name that is no string": (lambda p: {"name": 3}, "name must be a string"),
    "version 0": (lambda p: {"version": 0}, "version must be a whole number of at least 1, got 0"),
    "version True": (
        lambda p: {"version": True},
        "version must be a whole number of at least 1, got True of type bool",
    ),
    "no layout": (lambda p: {"role_layout": None}, "role_layout must be a RoleLayoutSpec"),
    "no schedule": (lambda p: {"update_schedule": {}}, "update_schedule must be a UpdateSchedule"),
    "no export": (lambda p: {"export": "student"}, "export must be a ExportSpec"),
    "objective that is no mapping": (lambda p: {"objective": [1]}, "objective must be a mapping"),
    "no mode": (lambda p: {"data_requirements": {}}, r"data_requirements\['mode'\] must not be empty"),
    "no objective": (lambda p: {"objective": {"name": ""}}, r"objective\['name'\] must not be empty"),
    "objective None": (lambda p: {"objective": {"name": None}}, r"objective\['name'\] must not be empty"),
    "no strategy": (lambda p: {"rollout": {}}, r"rollout\['strategy'\] must not be empty"),
    "no stage": (lambda p: {"initialization": {}}, r"initialization\['stage'\] must not be empty"),
    "capabilities as a string": (lambda p: {"required_capabilities": "abc"}, "must be a sequence of str"),
    "no model_ref": (
        lambda p: {
            "role_layout": replace(p.role_layout, groups=[replace(g, model_ref="") for g in p.role_layout.groups])
        },
        r"\['base'\] have no model_ref; pass model_path",
    ),
    "no teacher": (
        lambda p: {"role_layout": without(p.role_layout, "teacher_score")},
        r"required roles \['teacher_score'\]",
    ),
    "no fake score": (
        lambda p: {"role_layout": without(p.role_layout, "fake_score")},
        r"required roles \['fake_score'\]",
    ),
    "no average": (
        lambda p: {"role_layout": without(p.role_layout, "student_ema")},
        r"required roles \['student_ema'\]",
    ),
    "no student": (lambda p: {"role_layout": without(p.role_layout, "student")}, r"required roles \['student'\]"),
    "export of an unbound role": (
        lambda p: {
            "role_layout": without(p.role_layout, "student_ema"),
            "objective": {"name": "dmd2", "roles": ("student", "teacher_score")},
        },
        "export role 'student_ema' is not bound",
    ),
    "average without a home": (
        lambda p: {
            "role_layout": without(p.role_layout, "student_ema"),
            "objective": {"name": "dmd2", "roles": ("student", "teacher_score")},
            "export": ExportSpec("student"),
        },
        "update_ema needs the role student_ema",
    ),
    "phase of an unbound role": (
        lambda p: {
            "update_schedule": UpdateSchedule(
                (STUDENT_PHASE, UpdatePhaseSpec("fake_score", trainable_roles=("discriminator",)))
            )
        },
        r"trains \['discriminator'\], which are not trainable bindings",
    ),
    "phase of a frozen role": (
        lambda p: {
            "update_schedule": UpdateSchedule(
                (STUDENT_PHASE,), (UpdatePhaseSpec("fake_score", trainable_roles=("teacher_score",)),), 1
            )
        },
        r"trains \['teacher_score'\].*trainable are fake_score, student",
    ),
}


@pytest.mark.parametrize(("change", "message"), REFUSALS.values(), ids=REFUSALS)
def test_invariant_2_replacing_a_part_by_a_broken_one_is_refused(make_plan, change, message):
    plan = make_plan()

    with pytest.raises(PlanError, match=message) as refusal:
        replace(plan, **change(plan))

    assert "\n" not in str(refusal.value)
    validate_distillation_plan(plan)


def test_trainer_groups_come_in_the_order_in_which_outputs_flow(make_plan):
    plan = make_plan(role_storage="actor_critic")

    assert plan.groups == ("critic", "actor")
    assert [plan.roles_of(group) for group in plan.groups] == [
        ("teacher_score", "fake_score"),
        ("student", "student_ema"),
    ]
    assert [plan.trainable_role(group) for group in plan.groups] == ["fake_score", "student"]
    assert plan.group_of("student_ema") == "actor"


def test_a_group_of_frozen_roles_trains_nothing(make_plan):
    plan = make_plan("opd", fake_update_ratio=None)

    assert [(group, plan.trainable_role(group)) for group in plan.groups] == [("teacher", None), ("actor", "student")]


def test_a_group_that_trains_several_roles_has_not_one(make_plan):
    plan = make_plan()

    with pytest.raises(PlanError, match="'base' trains 2 roles, fake_score, student; ask trainable_roles_of"):
        plan.trainable_role("base")
    with pytest.raises(PlanError, match="no role group 'actor' in plan 'dmd2'; it has base"):
        plan.roles_of("actor")


@pytest.mark.parametrize(("ratio", "warmup", "steps"), [(2, 0, 8), (2, 3, 14), (1, 0, 4), (5, 1, 25)])
def test_optimizer_horizons_follow_from_the_schedule(make_plan, ratio, warmup, steps):
    plan = make_plan(fake_update_ratio=ratio, fake_warmup_cycles=warmup)

    assert plan.optimizer_steps(4) == {"student": 4, "fake_score": steps}


def test_the_horizon_of_a_discriminator_is_that_of_the_fake_score(make_plan):
    plan = make_plan(profile="paper", fake_warmup_cycles=1)

    assert plan.optimizer_steps(3) == {"student": 3, "fake_score": 8, "discriminator": 8}


def test_a_plan_of_ones_own_names_the_roles_that_its_objective_reads():
    layout = RoleLayoutSpec(
        (RoleGroupSpec("base", "/m"),),
        (RoleBinding("teacher_score", "base"), RoleBinding("student", "base", "student", True, "student")),
    )

    plan = DistillationPlan(
        name="mine",
        version=1,
        role_layout=layout,
        data_requirements={"mode": "prompts"},
        objective={"name": "regression", "roles": ["student", "teacher_score"]},
        rollout={"strategy": "one_step"},
        initialization={"stage": "base"},
        update_schedule=UpdateSchedule((STUDENT_PHASE,)),
        export=ExportSpec("student"),
    )

    assert plan.objective["roles"] == ("student", "teacher_score")
