"""The executor: reports of its ranks put together, batches cut and drawn ahead."""

from types import SimpleNamespace

import pytest

from miles_dmd.batches import RolloutBatches
from miles_dmd.contracts.reports import TrainReport
from miles_dmd.errors import PhaseError
from miles_dmd.executor import GroupExecutor, StartedRun, agreed, combined
from miles_dmd.handles import BatchHandle, ScoreHandle
from miles_dmd.modalities.diffusion import modality as diffusion
from miles_dmd.modalities.diffusion.options import DiffusionOptions
from miles_dmd.observe.spans import SpanLog
from miles_dmd.plan import build_plan, requests_until_student_update
from miles_dmd.plan.schedule import TrainerCounters
from miles_dmd.prompts import PromptSource


def report(**parts):
    return TrainReport(**{"weight": 2, "metrics": {"loss": 1.0}, **parts})


def test_ranks_that_disagree_end_the_run():
    with pytest.raises(PhaseError, match="ranks of 'critic' disagree"):
        agreed("critic", [report(), report(applied=False)])


@pytest.mark.parametrize("applied", [True, False])
def test_ranks_that_agree_decide(applied):
    assert agreed("critic", [report(applied=applied)] * 3) is applied


def test_means_are_over_samples_and_counts_add_up():
    metrics = combined(
        [
            report(weight=3, metrics={"loss": 1.0}, nonfinite=1, seconds=2.0, peak_memory=2**20),
            report(weight=1, metrics={"loss": 5.0}, nonfinite=2, seconds=1.0, peak_memory=3 * 2**20),
        ]
    )

    assert metrics == {"loss": 2.0, "weight": 4.0, "nonfinite": 3.0, "seconds": 2.0, "peak_memory_mib": 3.0}


def test_every_rank_gets_consecutive_chunks():
    batch = BatchHandle(ids=tuple(range(12)), policy_version=0, chunks=("a", "b", "c", "d", "e", "f"))

    assert [batch.of_rank(rank, 2) for rank in range(2)] == [("a", "b", "c"), ("d", "e", "f")]
    assert [batch.of_rank(rank, 3) for rank in range(3)] == [("a", "b"), ("c", "d"), ("e", "f")]


@pytest.mark.parametrize(
    ("producers", "ranks", "expected"),
    [(2, 2, ["a", "b"]), (1, 3, ["a", "a", "a"]), (4, 2, ["ab", "cd"]), (3, 2, ["ab", "bc"]), (2, 3, ["a", "ab", "b"])],
)
def test_every_rank_gets_the_scores_of_its_own_samples(producers, ranks, expected):
    scores = ScoreHandle("critic", tuple("abcd"[:producers]))

    assert ["".join(scores.of_rank(rank, ranks)) for rank in range(ranks)] == expected


@pytest.mark.parametrize(("sizes", "chunks"), [((1, 1), 1), ((2, 1), 2), ((2, 3), 6), ((4, 2), 4)])
def test_batches_are_cut_as_every_group_needs(sizes, chunks):
    groups = {str(index): SimpleNamespace(size=size) for index, size in enumerate(sizes)}

    assert GroupExecutor(None, None, StartedRun(groups, None), SpanLog()).num_chunks == chunks


class CountingRollouts:
    """Remembers how many batches each engine call sampled, and which samples were in them."""

    def __init__(self):
        self.calls, self.requests = [], []

    def generate(self, batches):
        self.calls.append(len(batches))
        self.requests += [request for batch in batches for request in batch]
        return [BatchHandle(tuple(r.sample_id for r in batch), 0, ()) for batch in batches]


@pytest.mark.parametrize(
    ("ratio", "warmup", "calls"), [(2, 0, [1, 3, 3, 2]), (3, 1, [4, 4, 4, 3]), (1, 2, [1, 2, 2, 2, 1])]
)
def test_engine_is_called_once_after_each_student_update(ratio, warmup, calls):
    """One call samples all fake-score batches of a cycle and the next student batch; none is drawn past the end."""
    config = {"model_path": "/m", "fake_update_ratio": ratio, "fake_warmup_cycles": warmup}
    schedule = build_plan("dmd2", config, {"distribution_matching"}).update_schedule
    rollouts, counters, last = CountingRollouts(), TrainerCounters(), 3
    executor = SimpleNamespace(generate=rollouts.generate)
    args = SimpleNamespace(rollout_batch_size=4, seed=7, modality_options=DiffusionOptions())
    ahead = lambda request: requests_until_student_update(schedule, counters, request, last)  # noqa: E731
    provider = RolloutBatches(args, diffusion, PromptSource(["a", "b", "c"], 7), executor, ahead)

    while counters.global_step < last:
        cycle = schedule.next_cycle(counters)
        for request in cycle.requests:
            provider.next(request)
        counters = schedule.counters_after(counters.completed_cycles + 1)

    assert rollouts.calls == calls
    assert sum(calls) == ratio * warmup + last * (1 + ratio)
    assert [request.sample_id for request in rollouts.requests] == list(range(4 * sum(calls)))
    assert len({request.seed for request in rollouts.requests}) == len(rollouts.requests)
    for start in range(0, len(rollouts.requests), 4):
        assert sorted(request.stop_step for request in rollouts.requests[start : start + 4]) == [0, 1, 2, 3]
