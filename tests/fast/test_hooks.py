"""What happens after a committed step: the best student is kept, and grids tell numbers that can be compared."""

import contextlib
import json
from types import SimpleNamespace

import numpy
import pytest

from miles_dmd import hooks
from miles_dmd.contracts.reports import SampleStatistics
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
    def make(keep_best, sample_interval=1, num_rollout=100, run=".", earlier=None):
        args = SimpleNamespace(keep_best=keep_best, sample_interval=sample_interval, num_rollout=num_rollout)
        (tmp_path / run).mkdir(exist_ok=True)
        return KeepBest(args, None, tmp_path / run / "student_best", earlier)

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


def resumed(best, state):
    best.load_state_dict(json.loads(json.dumps(state)))
    return best


@pytest.mark.parametrize("way", ["max", "min"])
@pytest.mark.parametrize("k", range(9))
@pytest.mark.parametrize("run", [".", "other"])
def test_resumed_run_chooses_as_the_uninterrupted_one(keep_best, exported, tmp_path, k, run, way):
    """Also within an interval, also in another directory, and whatever is left of what came after the checkpoint."""
    values = [3.0, 5.0, 4.0, float("nan"), 9.0, 1.0, 2.0, 6.0, 6.5]
    asked = {"keep_best": f"{way}:m", "sample_interval": 2, "num_rollout": 9}
    whole = keep_best(**asked, run="whole")
    play(whole, values)
    expected = (whole.state_dict(), exported.copy())
    exported.clear()
    first = keep_best(**asked)
    play(first, values[:k])
    state = first.state_dict()

    best = resumed(keep_best(**asked, run=run, earlier=tmp_path / "student_best"), state)
    play(best, values[k:], first=k + 1)

    assert (best.state_dict(), exported) == expected
    kept = json.loads((tmp_path / run / "student_best" / "best.json").read_text())
    assert kept == best.state_dict()["best"]
    assert (tmp_path / run / "student_best" / "weights").read_text() == str(kept["global_step"])


def test_best_student_that_is_lost_is_told_and_still_has_to_be_beaten(keep_best, exported, tmp_path, caplog):
    state = {"metric": "m", "way": "max", "values": [], "best": {"metric": "m", "value": 5.0, "global_step": 1}}

    play(resumed(keep_best("max:m"), state), [4.0, 6.0], first=2)

    assert exported == [3]
    assert "the best student so far (m 5 after step 1) is not kept any more" in caplog.text


def test_another_metric_begins_anew(keep_best, exported):
    first = keep_best("max:other")
    play(first, [None])
    first._best = {"metric": "other", "value": 9.0, "global_step": 1}

    play(resumed(keep_best("max:m"), first.state_dict()), [1.0], first=2)

    assert exported == [2]


def test_number_that_is_not_finite_is_never_best(keep_best, exported):
    play(keep_best("min:m"), [float("nan"), 2.0, float("-inf"), float("nan")])

    assert exported == [2]


def test_interval_without_the_metric_is_told_and_the_run_goes_on(keep_best, exported, caplog):
    """A number that takes twice --alarm-window cycles to be told, say."""
    play(keep_best("max:m", sample_interval=2), [None, None, None, 1.0])

    assert exported == [4]
    assert caplog.messages == ["--keep-best max:m: no such number up to step 2; nothing to judge"]


def test_warmup_cycle_and_a_run_without_the_flag_keep_nothing(keep_best, exported):
    keep_best("max:m").committed({"global_step": 0, "m": 9.0}, 0)
    play(keep_best(None), [1.0])

    assert exported == []


TEACHER = {"num_inference_steps": 28, "guidance_scale": 4.5}


class Drawing:
    """An executor of which the student's samples are ``spread`` apart."""

    def __init__(self, teacher=TEACHER):
        self.rollouts, self.limits, self.spread, self.teacher = self, [], 1.0, teacher
        self.teachers = 0
        self.spans = SimpleNamespace(span=lambda *args, **more: contextlib.nullcontext())

    def sampling(self):
        return self

    def teacher_pictures(self, requests, sampling):
        assert sampling == self.teacher
        self.teachers += 1
        images = numpy.zeros((len(requests), 4, 4, 3), dtype=numpy.uint8)
        return images, SampleStatistics(spread=2.0, saturation=0.001, limit=5.0)

    def with_averaged_weights(self, use):
        return use()

    def pictures(self, requests, limit):
        self.limits.append(limit)
        images = numpy.zeros((len(requests), 4, 4, 3), dtype=numpy.uint8)
        return images, SampleStatistics(spread=self.spread, saturation=0.0 if limit is None else 0.5, limit=3.0)


def test_grids_compare_with_the_teachers(tmp_path):
    args = SimpleNamespace(sample_prompts=1, seed=0, num_inference_steps=4)
    told, executor = [], Drawing()
    grids = SampleGrids(args, ["a digit"], tmp_path, TEACHER, told.append)

    grids.draw_teacher(executor)
    grids.draw(0, executor)

    assert executor.limits == [5.0]
    assert told == [{"samples/diversity": 0.5, "samples/saturation": 0.5}]
    assert (tmp_path / "reference.json").read_text() == '{"spread": 2.0, "limit": 5.0}\n'
    assert {path.name for path in tmp_path.glob("*.png")} == {"teacher.png", "step_000000.png"}


@pytest.mark.parametrize(
    ("where", "texts", "teacher", "drawn"),
    [
        ("a", ["a digit"], TEACHER, 0),
        ("b", ["a digit"], TEACHER, 1),
        ("a", ["a digit", "two"], TEACHER, 1),
        ("a", ["a digit"], {"guidance_scale": 2}, 1),
    ],
    ids=["the same", "another directory", "other prompts", "other guidance"],
)
def test_resumed_run_draws_the_teacher_where_it_is_not_there(tmp_path, where, texts, teacher, drawn):
    args, executor = SimpleNamespace(sample_prompts=2, seed=0, num_inference_steps=4), Drawing(teacher)
    first = SampleGrids(args, ["a digit"], tmp_path / "a", TEACHER)
    first.draw_teacher(Drawing())
    other = SampleGrids(args, texts, tmp_path / where, teacher)

    other.load_state_dict(json.loads(json.dumps(first.state_dict())))
    other.draw_teacher(executor)

    assert executor.teachers == drawn
    assert (tmp_path / where / "teacher.png").is_file()


def test_grids_compare_with_the_first_where_no_teacher_can_be_sampled_also_after_a_resume(tmp_path):
    args = SimpleNamespace(sample_prompts=1, seed=0, num_inference_steps=4)
    told, executor = [], Drawing()
    first, other = (SampleGrids(args, ["a digit"], tmp_path / name / "samples", {}, told.append) for name in "ab")

    first.draw_teacher(executor)
    first.draw(0, executor)
    executor.spread = 0.25
    other.load_state_dict(first.state_dict())
    other.draw(50, executor)

    assert executor.limits == [None, 3.0]
    assert told == [
        {"samples/diversity": 1.0, "samples/saturation": 0.0},
        {"samples/diversity": 0.25, "samples/saturation": 0.5},
    ]
    references = [(tmp_path / name / "samples" / "reference.json").read_text() for name in "ab"]
    assert references == ['{"spread": 1.0, "limit": 3.0}\n'] * 2
