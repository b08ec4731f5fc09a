"""A cycle is one student phase, first, and then the fake score; its arithmetic is exact."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_dmd.errors import PlanError
from miles_dmd.plan import (
    PhaseRequest,
    TrainerCounters,
    UpdatePhaseSpec,
    UpdateSchedule,
    requests_until_student_update,
)

STUDENT = UpdatePhaseSpec("student", trainable_roles=("student",))


def fake(repeats=1, policy="fresh", roles=("fake_score",), **more):
    return UpdatePhaseSpec("fake_score", repeats, policy, roles, **more)


REFUSALS = {
    "unknown kind": (
        lambda: UpdatePhaseSpec("teacher", trainable_roles=("x",)),
        "kind must be one of student, fake_score",
    ),
    "kind that is no string": (
        lambda: UpdatePhaseSpec(["student"], trainable_roles=("x",)),
        "phase kind must be one of",
    ),
    "unknown policy": (
        lambda: fake(policy="stale"),
        "batch_policy of the fake_score phase must be one of fresh, reuse",
    ),
    "no roles": (lambda: fake(roles=()), "needs at least one of trainable_roles"),
    "roles as a string": (
        lambda: fake(roles="fake_score"),
        "trainable_roles of the fake_score phase must be a sequence",
    ),
    "a role that is a number": (lambda: fake(roles=(3,)), r"trainable_roles .*\[0\] must be a str"),
    "duplicate roles": (
        lambda: fake(roles=("fake_score", "fake_score")),
        r"duplicate trainable_roles \['fake_score'\]",
    ),
    "student phase of another role": (
        lambda: UpdatePhaseSpec("student", trainable_roles=("fake_score",)),
        "trains exactly the role 'student'",
    ),
    "student phase of two roles": (
        lambda: UpdatePhaseSpec("student", trainable_roles=("student", "fake_score")),
        "trains exactly the role 'student'",
    ),
    "student phase on an old batch": (
        lambda: UpdatePhaseSpec("student", 1, "reuse_student", ("student",)),
        "a student phase takes a fresh batch",
    ),
    "fake phase of the student": (lambda: fake(roles=("fake_score", "student")), "must not train the student"),
    "average in a fake phase": (lambda: fake(update_ema=True), "update_ema belongs to a student phase"),
    "average as a number": (lambda: fake(update_ema=1), "update_ema of the fake_score phase must be true or false"),
    "no phases": (lambda: UpdateSchedule(()), "at least one phase"),
    "phases that are none": (lambda: UpdateSchedule(("student",)), r"phases\[0\] must be a UpdatePhaseSpec"),
    "no student": (lambda: UpdateSchedule((fake(),)), "exactly one student phase, first"),
    "student not first": (lambda: UpdateSchedule((fake(), STUDENT)), "exactly one student phase, first"),
    "student twice": (lambda: UpdateSchedule((STUDENT, fake(), STUDENT)), "exactly one student phase, first"),
    "student repeated": (
        lambda: UpdateSchedule((UpdatePhaseSpec("student", 2, "fresh", ("student",)), fake())),
        "with repeats=1",
    ),
    "cycles without phases": (lambda: UpdateSchedule((STUDENT,), (), 1), "1 cycles and 0 phases"),
    "phases without cycles": (lambda: UpdateSchedule((STUDENT,), (fake(),), 0), "0 cycles and 1 phases"),
    "student in the warm-up": (lambda: UpdateSchedule((STUDENT,), (STUDENT,), 1), "does not train in the warm-up"),
    "reuse in the warm-up": (
        lambda: UpdateSchedule((STUDENT,), (fake(1, "reuse_student"),), 1),
        "no student batch to reuse",
    ),
    "the same phase twice": (lambda: UpdateSchedule((STUDENT, fake(2), fake(3))), "occur twice in a cycle"),
}


@pytest.mark.parametrize(("build", "message"), REFUSALS.values(), ids=REFUSALS)
def test_invariant_3_a_schedule_that_contradicts_itself_is_refused(build, message):
    with pytest.raises(PlanError, match=message) as refusal:
        build()

    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("value", [True, 1.0, 0, -1, "2", None])
def test_invariant_4_repeats_are_a_whole_number(value):
    with pytest.raises(PlanError, match="repeats of the fake_score phase must be a whole number of at least 1"):
        fake(value)


@pytest.mark.parametrize("value", [True, 1.0, -1, "2", None])
def test_invariant_4_warmup_cycles_are_a_whole_number(value):
    with pytest.raises(PlanError, match="warmup_cycles must be a whole number of at least 0"):
        UpdateSchedule((STUDENT, fake()), (fake(),), value)


@pytest.mark.parametrize(
    ("counters", "name"),
    [
        ({"global_step": True}, "global_step"),
        ({"global_step": -1}, "global_step"),
        ({"completed_cycles": 1.0}, "completed_cycles"),
        ({"completed_cycles": "1"}, "completed_cycles"),
        ({"optimizer_steps": {"student": True}}, "optimizer_steps.student"),
        ({"optimizer_steps": {"student": 1.0}}, "optimizer_steps.student"),
        ({"optimizer_steps": {"student": -1}}, "optimizer_steps.student"),
        ({"optimizer_steps": {3: 1}}, "a key of optimizer_steps"),
        ({"optimizer_steps": [1]}, "optimizer_steps must be a mapping"),
    ],
)
def test_invariant_4_counters_are_whole_numbers(counters, name):
    with pytest.raises(PlanError, match=name):
        TrainerCounters(**counters)


def test_invariant_3_a_cycle_unrolls_the_student_once_and_then_every_repeat():
    schedule = UpdateSchedule((STUDENT, fake(2), fake(1, "reuse_student")), (fake(3),), 1)

    warmup = schedule.next_cycle(TrainerCounters())
    normal = schedule.next_cycle(TrainerCounters(4, {}, 5))

    assert (warmup.is_warmup, warmup.requires_student_update) == (True, False)
    assert [request.repeat_index for request in warmup.requests] == [0, 1, 2]
    assert (normal.is_warmup, normal.requires_student_update) == (False, True)
    assert normal.requests == (
        PhaseRequest("student", 4, 0, "fresh", ("student",)),
        PhaseRequest("fake_score", 4, 0, "fresh", ("fake_score",)),
        PhaseRequest("fake_score", 4, 1, "fresh", ("fake_score",)),
        PhaseRequest("fake_score", 4, 0, "reuse_student", ("fake_score",)),
    )


def test_a_student_phase_alone_is_a_cycle():
    assert [r.kind for r in UpdateSchedule((STUDENT,)).next_cycle(TrainerCounters()).requests] == ["student"]


def _drawn(schedule, counters, last_step=None):
    """Number of batches that each request of the next cycle could draw at once."""
    return [
        requests_until_student_update(schedule, counters, request, last_step)
        for request in schedule.next_cycle(counters).requests
    ]


def test_batches_of_a_cycle_and_the_next_student_batch_are_drawn_together():
    assert _drawn(UpdateSchedule((STUDENT, fake(3))), TrainerCounters()) == [1, 4, 3, 2]


def test_no_batch_is_drawn_past_the_last_step():
    schedule = UpdateSchedule((STUDENT, fake(3)), (fake(2),), 1)

    assert _drawn(schedule, TrainerCounters(0, {}, 1), last_step=1) == [1, 3, 2, 1]
    assert _drawn(schedule, TrainerCounters(0, {}, 1), last_step=2) == [1, 4, 3, 2]
    assert _drawn(schedule, TrainerCounters(), last_step=0) == [2, 1]


def test_only_the_last_warmup_cycle_draws_the_first_student_batch():
    schedule = UpdateSchedule((STUDENT, fake(3)), (fake(2),), 2)

    assert _drawn(schedule, TrainerCounters()) == [2, 1]
    assert _drawn(schedule, TrainerCounters(0, {}, 1)) == [3, 2]


def test_a_reused_batch_is_not_drawn():
    assert _drawn(UpdateSchedule((STUDENT, fake(2, "reuse_student"))), TrainerCounters()) == [1, 1, 1]
    assert _drawn(UpdateSchedule((STUDENT,)), TrainerCounters()) == [1]


def test_a_request_of_another_cycle_is_refused():
    schedule = UpdateSchedule((STUDENT, fake(2)))
    request = schedule.next_cycle(TrainerCounters(1, {}, 1)).requests[1]

    with pytest.raises(PlanError, match="none of the cycle that follows"):
        requests_until_student_update(schedule, TrainerCounters(), request)


@given(ratio=st.integers(1, 5), warmup=st.integers(0, 3), warmup_ratio=st.integers(1, 4), last_step=st.integers(1, 4))
def test_drawing_together_serves_every_request_and_leaves_nothing_over(ratio, warmup, warmup_ratio, last_step):
    schedule = UpdateSchedule((STUDENT, fake(ratio)), (fake(warmup_ratio),) if warmup else (), warmup)
    counters, stock, drawn, policy_of_stock, policy = TrainerCounters(), 0, 0, 0, 0

    while counters.global_step < last_step:
        cycle = schedule.next_cycle(counters)
        for request in cycle.requests:
            if not stock:
                stock = requests_until_student_update(schedule, counters, request, last_step)
                drawn, policy_of_stock = drawn + stock, policy
            assert policy_of_stock == policy  # nothing is stale
            stock -= 1
            policy += request.kind == "student"
        counters = schedule.counters_after(counters.completed_cycles + 1)

    assert stock == 0
    assert drawn == warmup * warmup_ratio + last_step * (1 + ratio)
