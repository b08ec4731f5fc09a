"""A phase that all ranks skipped ends its cycle uncommitted: fatal, or within a bound."""

import pytest

from miles_dmd.plan import FakeDistillationHooks, FakePhaseExecutor, PhaseReportError, PhaseResult, TrainerCounters


def test_a_skipped_student_is_fatal_and_the_fake_score_does_not_train(make_controller):
    controller = make_controller(executor=FakePhaseExecutor(skip_student=True))

    with pytest.raises(ValueError, match=r"student phase .* skipped.*max_consecutive_skipped_cycles allows 0"):
        controller.run(1)

    assert [request.kind for request in controller.executor.executed] == ["student"]
    assert controller.counters == TrainerCounters()
    assert controller.failed


class Skipping(FakePhaseExecutor):
    """Skips in the phases whose numbers are ``skipped``."""

    def __init__(self, *skipped):
        super().__init__()
        self.skipped = skipped

    def execute_phase(self, request, batch):
        result = super().execute_phase(request, batch)
        return PhaseResult({}, {}) if len(self.executed) - 1 in self.skipped else result


def test_a_skip_within_the_bound_is_counted_and_leaves_the_cycle_uncommitted(make_controller):
    hooks, seen = FakeDistillationHooks(), []
    controller = make_controller(
        executor=Skipping(3),
        hooks=hooks,
        max_consecutive_skipped_cycles=1,
        observer=lambda counters, metrics: seen.append(counters.global_step),
    )

    controller.run(2)

    assert controller.skipped_cycles == 1
    assert controller.counters == TrainerCounters(2, {"student": 2, "fake_score": 4}, 2)
    assert [call["global_step"] for call in hooks.calls] == seen == [1, 2]
    assert len(controller.executor.executed) == 3 + 1 + 3


@pytest.mark.parametrize("phase", [1, 2])
def test_a_skip_after_the_students_step_is_fatal_under_every_bound(make_controller, phase):
    controller = make_controller(executor=Skipping(3 + phase), max_consecutive_skipped_cycles=9)

    with pytest.raises(PhaseReportError, match="the student of the same cycle has stepped already"):
        controller.run(2)

    assert controller.counters == TrainerCounters(1, {"student": 1, "fake_score": 2}, 1)
    assert controller.failed


def test_skips_in_a_row_beyond_the_bound_are_fatal(make_controller):
    controller = make_controller(executor=Skipping(3, 4, 5), max_consecutive_skipped_cycles=2)

    with pytest.raises(PhaseReportError, match="3 cycles in a row, where max_consecutive_skipped_cycles allows 2"):
        controller.run(2)

    assert controller.counters.global_step == 1
    assert controller.failed


def test_a_committed_cycle_ends_a_row_of_skips(make_controller):
    controller = make_controller(executor=Skipping(0, 4, 8), max_consecutive_skipped_cycles=1)

    controller.run(3)

    assert controller.skipped_cycles == 3
    assert controller.counters.global_step == 3


def test_a_skip_in_the_warmup_is_bounded_as_well(make_plan, make_controller):
    plan = make_plan(fake_warmup_cycles=1)

    controller = make_controller(plan, Skipping(1), max_consecutive_skipped_cycles=1)
    controller.run(1)
    assert controller.counters.optimizer_steps == {"fake_score": 2}
    with pytest.raises(PhaseReportError, match="fake_score phase after step 0 skipped"):
        make_controller(plan, Skipping(1)).run(1)


def test_what_was_skipped_is_counted_on_after_a_resume(make_controller):
    first = make_controller(executor=Skipping(3), max_consecutive_skipped_cycles=1)
    first.run(1)
    first.run_cycle()
    resumed = make_controller(executor=Skipping(0), max_consecutive_skipped_cycles=1)

    resumed.load_state_dict(first.state_dict())
    resumed.skips.load_state_dict(first.skips.state_dict())

    assert resumed.skipped_cycles == 1
    with pytest.raises(PhaseReportError, match="2 cycles in a row"):
        resumed.run_cycle()
