"""Whatever fails, wherever: the counters are those of whole cycles, and the driver is done."""

import traceback

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_dmd.errors import PhaseError
from miles_dmd.plan import (
    DistillationTrainerController,
    FakeBatchProvider,
    FakeDistillationHooks,
    FakePhaseExecutor,
    TrainerCounters,
    build_plan,
)


class Raising:
    """Forwards to ``part`` until its ``index``-th call, which raises."""

    def __init__(self, part, index, error):
        self.part, self.index, self.error, self.calls = part, index, error, 0

    def _call(self, *args):
        self.calls += 1
        if self.calls - 1 == self.index:
            raise self.error
        return getattr(self.part, self.method)(*args)


class RaisingProvider(Raising):
    method, next = "next", Raising._call


class RaisingExecutor(Raising):
    method, execute_phase = "execute_phase", Raising._call


class RaisingHooks(Raising):
    method, after_completed_step = "after_completed_step", Raising._call


ERRORS = [
    RuntimeError("out of memory\non device 0"),
    StopIteration("no more"),
    KeyboardInterrupt(),
    SystemExit(3),
    GeneratorExit(),
]


@pytest.mark.parametrize("index", range(3, 6))
@pytest.mark.parametrize("part", [RaisingProvider, RaisingExecutor], ids=["provider", "executor"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_invariant_8_a_failure_in_any_phase_leaves_the_last_whole_cycle(make_plan, error, part, index):
    provider, executor = FakeBatchProvider(100), FakePhaseExecutor()
    if part is RaisingProvider:
        provider = RaisingProvider(provider, index, error)
    else:
        executor = RaisingExecutor(executor, index, error)
    controller = DistillationTrainerController(make_plan(), provider, executor)
    controller.run(1)
    metrics = controller.phase_metrics

    with pytest.raises(type(error)) as raised:
        controller.run(3)

    assert raised.value is error
    assert controller.counters == TrainerCounters(1, {"student": 1, "fake_score": 2}, 1)
    assert controller.phase_metrics == metrics
    assert controller.failed


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", ["hook", "observer"])
def test_invariant_8_a_failure_after_the_commit_takes_the_cycle_back_and_says_so(make_controller, where, error):
    raising = RaisingHooks(FakeDistillationHooks(), 1, error)
    if where == "hook":
        controller = make_controller(hooks=raising)
    else:
        controller = make_controller(
            observer=lambda counters, metrics: raising.after_completed_step(counters, metrics, None)
        )

    with pytest.raises(type(error)) as raised:
        controller.run(3)

    assert controller.counters == TrainerCounters(1, {"student": 1, "fake_score": 2}, 1)
    assert controller.phase_metrics["student"] == ({"loss": 1.0},)
    assert "step 2, of which an artefact may exist; the counters are back at step 1" in "".join(
        traceback.format_exception(raised.value)
    )
    with pytest.raises(PhaseError, match="in a hook or observer of step 2") as refusal:
        controller.run(1)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", ["hook", "observer"])
def test_a_cycle_whose_hook_fails_can_be_saved_first(make_controller, where, error):
    """The weights are those of a whole cycle: it stays committed if that works."""
    raising, saved = RaisingHooks(FakeDistillationHooks(), 1, error), []
    late = (
        {"hooks": raising} if where == "hook" else {"observer": lambda c, m: raising.after_completed_step(c, m, None)}
    )
    controller = make_controller(**late, rescue=lambda *told: saved.append(told) or True)

    with pytest.raises(type(error)) as raised:
        controller.run(3)

    assert saved == [(error, controller.counters, controller.phase_metrics)]
    assert controller.counters == TrainerCounters(2, {"student": 2, "fake_score": 4}, 2)
    assert raised.value.__notes__[-1].endswith("of which an artefact may exist; the cycle is saved")
    with pytest.raises(PhaseError, match="in a hook or observer of step 2"):
        controller.run(1)


def test_a_failure_in_a_phase_is_not_saved(make_controller):
    saved = []
    controller = make_controller(executor=FakePhaseExecutor(fail_on=4), rescue=lambda *told: saved.append(told))

    with pytest.raises(RuntimeError):
        controller.run(3)

    assert saved == []


def test_a_rescue_that_fails_too_hides_nothing(make_controller):
    def full(*told):
        raise OSError(28, "No space left on device")

    controller = make_controller(hooks=RaisingHooks(FakeDistillationHooks(), 1, ValueError("first")), rescue=full)

    with pytest.raises(ValueError, match="first") as raised:
        controller.run(3)

    assert controller.counters.global_step == 1
    assert raised.value.__notes__[0] == "the cycle could not be saved either: [Errno 28] No space left on device"


def test_invariant_8_a_failed_driver_does_nothing_more_and_says_what_to_do(make_controller):
    controller = make_controller(executor=FakePhaseExecutor(fail_on=4))
    with pytest.raises(RuntimeError):
        controller.run(2)
    played, drawn = len(controller.executor.executed), controller.batch_provider.sent_batches

    state = {"global_step": 0, "optimizer_steps": {}, "completed_cycles": 0}
    for call in (
        controller.run_cycle,
        controller.reset,
        controller.state_dict,
        lambda: controller.run(1),
        lambda: controller.run(0),
        lambda: controller.run_until(0),
        lambda: controller.load_state_dict(state),
    ):
        with pytest.raises(
            RuntimeError, match=r"failed after step 1 .*restore the last completed-cycle checkpoint"
        ) as refusal:
            call()
        assert "\n" not in str(refusal.value)

    assert (len(controller.executor.executed), controller.batch_provider.sent_batches) == (played, drawn)


def test_invariant_8_running_out_of_batches_ends_the_run(make_controller):
    controller = make_controller(batches=5)

    with pytest.raises(StopIteration, match="all 5 batches are sent"):
        controller.run(2)

    assert controller.failed
    assert controller.counters.global_step == 1


@settings(max_examples=60, deadline=None)
@given(ratio=st.integers(1, 4), warmup=st.integers(0, 3), fail_on=st.integers(0, 25))
def test_invariant_8_wherever_a_run_fails_its_counters_are_those_of_whole_cycles(ratio, warmup, fail_on):
    config = {"model_path": "/m", "fake_update_ratio": ratio, "fake_warmup_cycles": warmup}
    plan = build_plan("dmd2", config, {"distribution_matching"})
    controller = DistillationTrainerController(plan, FakeBatchProvider(100), FakePhaseExecutor(fail_on=fail_on))

    with pytest.raises(RuntimeError, match="fail_on"):
        controller.run(100)

    before = controller.counters
    whole = plan.update_schedule.counters_after(before.completed_cycles)
    played = ratio * min(before.completed_cycles, warmup) + (1 + ratio) * before.global_step
    assert (before.global_step, before.completed_cycles) == (whole.global_step, whole.completed_cycles)
    assert {k: v for k, v in whole.optimizer_steps.items() if v} == before.optimizer_steps
    assert 0 <= fail_on - played <= ratio
