"""The fakes are strict enough to catch a driver that mixes up phases and batches."""

import pytest

from miles_dmd.errors import PhaseError, PlanError
from miles_dmd.plan import FakeBatchProvider, FakePhaseExecutor, PhaseRequest

STUDENT = PhaseRequest("student", 0, 0, "fresh", ("student",), True)
FAKE = PhaseRequest("fake_score", 0, 0, "fresh", ("fake_score",))
REUSING = PhaseRequest("fake_score", 0, 0, "reuse_student", ("fake_score",))


def test_fresh_batches_are_numbered_and_run_out():
    provider = FakeBatchProvider(2, 8)

    batches = [provider.next(STUDENT), provider.next(FAKE)]

    assert [(batch["kind"], batch["index"], batch["batch_size"]) for batch in batches] == [
        ("student", 0, 8),
        ("fake_score", 1, 8),
    ]
    with pytest.raises(StopIteration, match="all 2 batches are sent"):
        provider.next(FAKE)
    assert provider.sent_batches == 2


def test_a_reused_batch_is_a_copy_of_the_last_student_batch():
    provider = FakeBatchProvider(3)
    provider.next(STUDENT)
    provider.next(FAKE)

    provider.next(REUSING)["index"] = 9

    assert provider.next(REUSING)["index"] == 0
    assert provider.sent_batches == 2


def test_there_is_nothing_to_reuse_before_the_first_student_phase():
    with pytest.raises(PhaseError, match="no student batch to reuse"):
        FakeBatchProvider(3).next(REUSING)


@pytest.mark.parametrize("arguments", [(-1, 1), (True, 1), (2, 0), (2, 1.0)])
def test_counts_of_the_fake_provider_are_whole_numbers(arguments):
    with pytest.raises(PlanError, match="must be a whole number"):
        FakeBatchProvider(*arguments)


def test_the_fake_executor_refuses_a_batch_of_another_phase():
    with pytest.raises(PhaseError, match="made for the fake_score phase came to the student phase"):
        FakePhaseExecutor().execute_phase(STUDENT, {"kind": "fake_score"})


@pytest.mark.parametrize("fail_on", ["fake_score", 1])
def test_the_fake_executor_fails_on_a_kind_or_a_number(fail_on):
    executor = FakePhaseExecutor(fail_on=fail_on)

    assert executor.execute_phase(STUDENT, {"kind": "student"}).optimizer_steps == {"student": 1}
    with pytest.raises(RuntimeError, match="the fake_score phase fails"):
        executor.execute_phase(FAKE, {"kind": "fake_score"})
    assert executor.executed == [STUDENT, FAKE]


def test_the_fake_executor_can_skip_the_student():
    executor = FakePhaseExecutor(skip_student=True)

    assert executor.execute_phase(STUDENT, {"kind": "student"}).optimizer_steps == {}
    assert executor.execute_phase(FAKE, {"kind": "fake_score"}).optimizer_steps == {"fake_score": 1}
