"""What happens after a committed step: the best student is kept, and grids tell numbers that can be compared."""

import contextlib
import json
from types import SimpleNamespace

import numpy
import pytest

from miles_dmd import hooks
from miles_dmd.contracts.reports import SampleStatistics
from miles_dmd.errors import MilesDmdError
from miles_dmd.hooks import KeepBest, SampleGrids


@pytest.fixture
def exported(monkeypatch):
    """Steps at which a student was exported; the export is a file that says so."""
    steps = []

    def export(args, loss_type, executor, directory):
        directory.mkdir()
        (directory / "weights").write_text(str(executor))
        steps.append(executor)

    monkeypatch.setattr(hooks, "export_student", export)
    return steps


@pytest.fixture
def keep_best(tmp_path, exported):
    def make(keep_best, sample_interval=1, num_rollout=100):
        args = SimpleNamespace(keep_best=keep_best, sample_interval=sample_interval, num_rollout=num_rollout)
        return KeepBest(args, None, tmp_path / "student_best")

    return make


def play(best, values, first=1):
    for step, value in enumerate(values, start=first):
        best.committed({"global_step": step, **({} if value is None else {"m": value})}, step)


@pytest.mark.parametrize(("way", "steps"), [("max", [1, 3, 5]), ("min", [1, 2])])
def test_student_is_exported_whenever_it_beats_all_before(keep_best, exported, tmp_path, way, steps):
    play(keep_best(f"{way}:m"), [2.0, 1.0, 3.0, 3.0, 4.0])

    assert exported == steps
    kept = json.loads((tmp_path / "student_best" / "best.json").read_text())
    assert kept == {"metric": "m", "value": 4.0 if way == "max" else 1.0, "global_step": steps[-1]}
    assert (tmp_path / "student_best" / "weights").read_text() == str(steps[-1])
    assert [path.name for path in tmp_path.iterdir()] == ["student_best"]


def test_it_judges_the_mean_of_an_interval_and_once_more_at_the_end(keep_best, exported):
    best = keep_best("max:m", sample_interval=3, num_rollout=7)

    play(best, [0.0, 0.0, 9.0, 4.0, 4.0, 4.0, 3.9])

    assert exported == [3, 6]  # means 3, 4 and 3.9


def test_resumed_run_knows_what_was_best(keep_best, exported):
    play(keep_best("max:m"), [5.0])

    play(keep_best("max:m"), [4.0, 6.0], first=2)

    assert exported == [1, 3]


def test_number_that_is_not_finite_is_never_best(keep_best, exported):
    play(keep_best("min:m"), [float("nan"), 2.0, float("-inf"), float("nan")])

    assert exported == [2]


def test_metric_that_no_cycle_has_is_refused_with_those_there_are(keep_best):
    with pytest.raises(MilesDmdError, match="--keep-best max:n: no such metric; there are global_step, m"):
        play(keep_best("max:n"), [1.0])


def test_warmup_cycle_and_a_run_without_the_flag_keep_nothing(keep_best, exported):
    keep_best("max:m").committed({"global_step": 0, "m": 9.0}, 0)
    play(keep_best(None), [1.0])

    assert exported == []


class Drawing:
    """An executor of which the student's samples are ``spread`` apart."""

    def __init__(self):
        self.rollouts, self.limits, self.spread = self, [], 1.0
        self.spans = SimpleNamespace(span=lambda *args, **more: contextlib.nullcontext())

    def with_averaged_weights(self, use):
        return use()

    def pictures(self, requests, limit):
        self.limits.append(limit)
        images = numpy.zeros((len(requests), 4, 4, 3), dtype=numpy.uint8)
        return images, SampleStatistics(spread=self.spread, saturation=0.0 if limit is None else 0.5, limit=3.0)


def test_grids_compare_with_the_first_also_after_a_resume(tmp_path):
    args = SimpleNamespace(sample_prompts=1, seed=0, num_inference_steps=4)
    told, executor = [], Drawing()

    def grids():
        return SampleGrids(args, ["a digit"], tmp_path / "samples", told.append)

    grids().draw(0, executor)
    executor.spread = 0.25
    grids().draw(50, executor)

    assert executor.limits == [None, 3.0]
    assert told == [
        {"samples/diversity": 1.0, "samples/saturation": 0.0},
        {"samples/diversity": 0.25, "samples/saturation": 0.5},
    ]
