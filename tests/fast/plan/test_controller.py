"""A cycle plays its phases in order, is committed as a whole, and only then is shown to hooks."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_dmd.errors import PlanError
from miles_dmd.plan import (
    DistillationTrainerController,
    FakeBatchProvider,
    FakeDistillationHooks,
    FakePhaseExecutor,
    PhaseReportError,
    PhaseResult,
    TrainerCounters,
    build_plan,
)


class Reporting(FakePhaseExecutor):
    """Reports ``steps`` in phase number ``index``, one step of each requested role in every other."""

    def __init__(self, index, steps):
        super().__init__()
        self.index, self.steps = index, steps

    def execute_phase(self, request, batch):
        result = super().execute_phase(request, batch)
        return self.steps if len(self.executed) - 1 == self.index else result


def steps_of(controller):
    return controller.counters.optimizer_steps


def test_two_cycles_leave_two_student_and_four_fake_score_steps(make_controller):
    hooks = FakeDistillationHooks()
    controller = make_controller(hooks=hooks, batches=6)

    controller.run(2)

    assert controller.counters == TrainerCounters(2, {"student": 2, "fake_score": 4}, 2)
    assert controller.batch_provider.sent_batches == 6
    assert [call["global_step"] for call in hooks.calls] == [1, 2]


@pytest.mark.parametrize("ratio", [1, 2, 5])
def test_invariant_3_the_student_trains_once_and_first_then_the_fake_score(make_plan, make_controller, ratio):
    executor = FakePhaseExecutor()

    make_controller(make_plan(fake_update_ratio=ratio), executor).run(2)

    assert [r.kind for r in executor.executed] == 2 * (["student"] + ratio * ["fake_score"])
    assert [r.repeat_index for r in executor.executed] == 2 * [0, *range(ratio)]
    assert [r.global_step for r in executor.executed] == (1 + ratio) * [0] + (1 + ratio) * [1]


def test_invariant_5_the_warmup_advances_role_counters_and_cycles_only(make_plan, make_controller):
    hooks, seen = FakeDistillationHooks(), []
    controller = make_controller(
        make_plan(fake_warmup_cycles=2),
        hooks=hooks,
        observer=lambda counters, metrics: seen.append((counters, metrics)),
    )

    controller.run(2)

    assert controller.counters == TrainerCounters(0, {"fake_score": 4}, 2)
    assert hooks.calls == []
    assert [counters.completed_cycles for counters, _ in seen] == [1, 2]
    assert seen[1][1] == {"fake_score": ({"loss": 3.0}, {"loss": 4.0})}


def test_run_counts_cycles_and_run_until_counts_student_steps(make_plan, make_controller):
    controller = make_controller(make_plan(fake_warmup_cycles=2))

    controller.run_until(3)
    assert (controller.counters.global_step, controller.counters.completed_cycles) == (3, 5)
    controller.run_until(2)
    assert controller.counters.global_step == 3
    controller.run(1)
    assert controller.counters.global_step == 4


@pytest.mark.parametrize("value", [True, 1.0, -1, "2", None])
def test_invariant_4_numbers_of_cycles_and_steps_are_whole_numbers(make_controller, value):
    controller = make_controller()

    with pytest.raises(PlanError, match="num_cycles must be a whole number"):
        controller.run(value)
    with pytest.raises(PlanError, match="global_step must be a whole number"):
        controller.run_until(value)
    with pytest.raises(PlanError, match="max_consecutive_skipped_cycles must be a whole number"):
        make_controller(max_consecutive_skipped_cycles=value)
    controller.run(1)
    assert controller.counters.global_step == 1


@pytest.mark.parametrize("index", range(6))
def test_invariant_6_a_step_is_committed_once_and_after_all_phases(make_controller, index):
    controller = make_controller(executor=FakePhaseExecutor(fail_on=index))

    with pytest.raises(RuntimeError, match=f"fail_on={index}"):
        controller.run(2)

    assert controller.counters == controller.plan.update_schedule.counters_after(index // 3)
    assert len(controller.executor.executed) == index + 1


def test_invariant_6_during_a_cycle_the_counters_are_those_of_the_last(make_controller):
    seen = []

    class Watching(FakePhaseExecutor):
        def execute_phase(self, request, batch):
            seen.append((controller.counters.global_step, dict(steps_of(controller)), controller.phase_metrics))
            return super().execute_phase(request, batch)

    controller = make_controller(executor=Watching())
    controller.run(1)

    assert seen == 3 * [(0, {}, {})]


WRONG_STEPS = {
    "two": {"fake_score": 2},
    "none of its role": {"fake_score": 0},
    "a boolean": {"fake_score": True},
    "a real number": {"fake_score": 1.0},
    "another role": {"student": 1},
    "one role too many": {"fake_score": 1, "student": 1},
    "a role that is no name": {"fake_score": 1, 3: 1},
}


@pytest.mark.parametrize("steps", WRONG_STEPS.values(), ids=WRONG_STEPS)
def test_invariant_7_each_requested_role_reports_one_step_and_no_other_role_any(make_controller, steps):
    controller = make_controller(executor=Reporting(4, PhaseResult({}, steps)))

    with pytest.raises(PhaseReportError, match="fake_score phase") as refusal:
        controller.run(2)

    assert isinstance(refusal.value, ValueError)
    assert controller.counters == TrainerCounters(1, {"student": 1, "fake_score": 2}, 1)
    assert controller.failed


@pytest.mark.parametrize(
    "steps", [{"student": 2}, {"student": True}, {"fake_score": 1}, {"student": 1, "student_ema": 1}]
)
def test_invariant_7_the_student_reports_one_step(make_controller, steps):
    controller = make_controller(executor=Reporting(0, PhaseResult({}, steps)))

    with pytest.raises(PhaseReportError, match="student phase"):
        controller.run(1)


@pytest.mark.parametrize("steps", [{"fake_score": 1}, {"discriminator": 1}, {"fake_score": 1, "discriminator": 2}])
def test_invariant_7_both_roles_of_an_adversarial_phase_report_a_step(make_plan, make_controller, steps):
    plan = make_plan(profile="paper")

    make_controller(plan).run(1)
    with pytest.raises(PhaseReportError, match="fake_score phase"):
        make_controller(plan, Reporting(1, PhaseResult({}, steps))).run(1)


@pytest.mark.parametrize(
    "result", [None, {}, {"optimizer_steps": {"student": 1}}, 1, PhaseResult({}, [("student", 1)])]
)
def test_invariant_7_a_phase_returns_a_phase_result(make_controller, result):
    with pytest.raises(TypeError, match="PhaseResult"):
        make_controller(executor=Reporting(0, result)).run(1)


def test_invariant_9_hooks_see_what_was_committed(make_controller):
    class Checking(FakeDistillationHooks):
        def after_completed_step(self, counters, metrics, executor):
            super().after_completed_step(counters, metrics, executor)
            assert counters == controller.counters
            assert controller.state_dict()["global_step"] == counters.global_step
            assert metrics == controller.phase_metrics
            assert executor is controller.executor

    hooks = Checking()
    controller = make_controller(hooks=hooks)

    controller.run(3)

    assert [call["global_step"] for call in hooks.calls] == [1, 2, 3]
    assert [call["optimizer_steps"] for call in hooks.calls] == [{"student": n, "fake_score": 2 * n} for n in (1, 2, 3)]


def test_invariant_9_a_hook_that_changes_its_arguments_changes_no_run(make_controller):
    class Meddling:
        def after_completed_step(self, counters, metrics, executor):
            counters.global_step = 77
            counters.optimizer_steps["student"] = 77
            metrics["student"][0]["loss"] = 77
            metrics.clear()

    after = FakeDistillationHooks()
    controller = make_controller(hooks=[Meddling(), after])

    controller.run(2)
    controller.counters.global_step = 88
    controller.phase_metrics.clear()

    assert controller.counters == TrainerCounters(2, {"student": 2, "fake_score": 4}, 2)
    assert controller.phase_metrics["student"] == ({"loss": 4.0},)
    assert [call["metrics"]["student"] for call in after.calls] == [({"loss": 1.0},), ({"loss": 4.0},)]


def test_invariant_9_hooks_run_in_their_order_and_the_observer_last(make_controller):
    order = []

    class Named:
        def __init__(self, name):
            self.name = name

        def after_completed_step(self, counters, metrics, executor):
            order.append(self.name)

    hooks = [Named(name) for name in ("checkpoint", "evaluate", "export")]
    make_controller(hooks=hooks, observer=lambda counters, metrics: order.append("observer")).run(1)

    assert order == ["checkpoint", "evaluate", "export", "observer"]


def test_every_repeat_keeps_its_metrics(make_plan, make_controller):
    controller = make_controller(make_plan(fake_update_ratio=5))

    controller.run(2)

    assert controller.phase_metrics == {
        "student": ({"loss": 7.0},),
        "fake_score": tuple({"loss": float(n)} for n in range(8, 13)),
    }


def test_reuse_student_plays_the_student_batch_again(make_plan, make_controller):
    plan = make_plan()
    student, fake = plan.update_schedule.phases
    schedule = replace(plan.update_schedule, phases=(student, replace(fake, batch_policy="reuse_student")))
    controller = make_controller(replace(plan, update_schedule=schedule), batches=2)

    controller.run(2)

    assert controller.batch_provider.sent_batches == 2
    assert steps_of(controller) == {"student": 2, "fake_score": 4}


def test_a_skip_with_metrics_of_several_ranks_is_no_step(make_controller):
    controller = make_controller(executor=Reporting(0, PhaseResult({"nonfinite": 3.0})))

    with pytest.raises(PhaseReportError, match="on all ranks"):
        controller.run(1)


def test_the_parts_may_come_in_either_order_and_are_checked(make_plan):
    plan, provider, executor = make_plan(), FakeBatchProvider(3), FakePhaseExecutor()

    controller = DistillationTrainerController(plan, executor, provider)

    assert (controller.batch_provider, controller.executor) == (provider, executor)
    with pytest.raises(PlanError, match="batch_provider must have a method next"):
        DistillationTrainerController(plan, executor, executor)
    with pytest.raises(PlanError, match="executor must have a method execute_phase"):
        DistillationTrainerController(plan, provider, None)
    with pytest.raises(PlanError, match="a hook must have a method after_completed_step"):
        DistillationTrainerController(plan, provider, executor, lambda *_: None)
    with pytest.raises(PlanError, match="plan must be a DistillationPlan"):
        DistillationTrainerController({}, provider, executor)


def test_a_run_without_hooks_needs_none(make_plan):
    controller = DistillationTrainerController(make_plan(), FakeBatchProvider(3), FakePhaseExecutor())

    controller.run(1)

    assert controller.counters.global_step == 1


def test_on_policy_distillation_runs_on_the_same_loop(make_plan, make_controller):
    controller = make_controller(make_plan("opd", fake_update_ratio=None), batches=3)

    controller.run(3)

    assert controller.counters == TrainerCounters(3, {"student": 3}, 3)


@settings(max_examples=60, deadline=None)
@given(ratio=st.integers(1, 6), warmup=st.integers(0, 4), steps=st.integers(0, 5))
def test_counters_and_batches_add_up(ratio, warmup, steps):
    config = {"model_path": "/m", "fake_update_ratio": ratio, "fake_warmup_cycles": warmup}
    provider = FakeBatchProvider(1000)
    controller = DistillationTrainerController(
        build_plan("dmd2", config, {"distribution_matching"}), provider, FakePhaseExecutor()
    )

    controller.run(warmup + steps)

    assert controller.counters.global_step == steps
    assert controller.counters.completed_cycles == warmup + steps
    assert steps_of(controller).get("student", 0) == steps
    assert steps_of(controller).get("fake_score", 0) == ratio * (warmup + steps)
    assert provider.sent_batches == ratio * warmup + steps * (1 + ratio)
    assert controller.plan.optimizer_steps(steps) == {"fake_score": 0, "student": 0} | steps_of(controller)
