"""Counters are saved and taken back only where the plan's exact arithmetic puts them."""

import json

import pytest

from miles_dmd.errors import PlanError
from miles_dmd.plan import TrainerCounters


def test_reset_goes_back_to_the_start(make_controller):
    controller = make_controller()
    controller.run(2)

    controller.reset()

    assert (controller.counters, controller.phase_metrics, controller.failed) == (TrainerCounters(), {}, False)
    controller.run(1)
    assert controller.counters.global_step == 1


def test_state_survives_a_file_and_the_run_goes_on(make_plan, make_controller):
    plan = make_plan(fake_warmup_cycles=1)
    first = make_controller(plan)
    first.run_until(2)

    second = make_controller(plan)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.run_until(3)

    assert first.state_dict() == {
        "global_step": 2,
        "optimizer_steps": {"student": 2, "fake_score": 6},
        "completed_cycles": 3,
    }
    assert second.counters == TrainerCounters(3, {"student": 3, "fake_score": 8}, 4)


def test_state_is_a_copy(make_controller):
    controller = make_controller()
    controller.run(1)

    controller.state_dict()["optimizer_steps"]["student"] = 9

    assert controller.counters.optimizer_steps["student"] == 1


STATES = {
    "not a mapping": ([1], "state must be a mapping"),
    "a key too few": ({"global_step": 2, "completed_cycles": 3}, "state lacks 'optimizer_steps'"),
    "a key too many": ({"epoch": 1}, "state has an unknown 'epoch'"),
    "negative": ({"global_step": -1}, "global_step must be a whole number of at least 0"),
    "boolean": ({"completed_cycles": True}, "completed_cycles must be a whole number"),
    "real": (
        {"optimizer_steps": {"student": 2.0, "fake_score": 6}},
        "optimizer_steps.student must be a whole number",
    ),
    "steps that are none": ({"optimizer_steps": [2, 6]}, "optimizer_steps must be a mapping"),
    "unknown role": (
        {"optimizer_steps": {"student": 2, "fake_score": 6, "teacher_score": 0}},
        "names .*'teacher_score'",
    ),
    "student apart from the step": ({"optimizer_steps": {"student": 1, "fake_score": 6}}, "of 'student' is 1.*make 2"),
    "fake score too few": ({"optimizer_steps": {"student": 2, "fake_score": 4}}, "of 'fake_score' is 4, .* make 6"),
    "fake score too many": ({"optimizer_steps": {"student": 2, "fake_score": 7}}, "of 'fake_score' is 7, .* make 6"),
    "no fake score": ({"optimizer_steps": {"student": 2}}, "of 'fake_score' is 0, .* make 6"),
    "fewer cycles than steps": ({"completed_cycles": 1}, "global_step 2 does not follow from completed_cycles 1"),
    "cycles without their warm-up": ({"completed_cycles": 2}, "with 1 warm-up cycles, which makes 1"),
    "more cycles than steps": ({"completed_cycles": 9}, "global_step 2 does not follow from completed_cycles 9"),
}


@pytest.mark.parametrize(("change", "message"), STATES.values(), ids=STATES)
def test_a_state_that_this_plan_does_not_reach_is_refused(make_plan, make_controller, change, message):
    controller = make_controller(make_plan(fake_warmup_cycles=1))
    state = {"global_step": 2, "optimizer_steps": {"student": 2, "fake_score": 6}, "completed_cycles": 3}
    if change == {"global_step": 2, "completed_cycles": 3}:
        state.pop("optimizer_steps")

    with pytest.raises(PlanError, match=message):
        controller.load_state_dict(state | change if isinstance(change, dict) else change)

    assert controller.counters == TrainerCounters()
    assert not controller.failed


def test_counters_to_start_from_are_checked_like_a_state(make_controller):
    assert make_controller(counters=TrainerCounters(1, {"student": 1, "fake_score": 2}, 1)).counters.global_step == 1
    with pytest.raises(PlanError, match="of 'fake_score' is 0"):
        make_controller(counters=TrainerCounters(1, {"student": 1}, 1))
