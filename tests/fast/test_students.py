"""The best student is kept beside the last, by what the user asked for."""

import json
from types import SimpleNamespace

import pytest

from miles_dmd import students
from miles_dmd.errors import SaveError
from miles_dmd.students import KeepBest


@pytest.fixture
def exported(monkeypatch):
    """Steps at which a student was exported; the export is a file that says so."""
    steps = []

    def export(run, executor, directory):
        directory.mkdir()
        (directory / "weights").write_text(str(executor))
        steps.append(executor)

    monkeypatch.setattr(students, "export_student", export)
    return steps


@pytest.fixture
def keep_best(tmp_path, exported):
    def make(keep_best, sample_interval=1, num_rollout=100, run=".", earlier=None, on_save_failure="stop"):
        args = SimpleNamespace(
            keep_best=keep_best,
            sample_interval=sample_interval,
            num_rollout=num_rollout,
            on_save_failure=on_save_failure,
        )
        (tmp_path / run).mkdir(exist_ok=True)
        return KeepBest(SimpleNamespace(args=args), tmp_path / run / "student_best", earlier)

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


@pytest.fixture
def no_room(tmp_path):
    """An export of step 2 or 3 cannot be written: what it is renamed to is in the way, and cannot be removed so."""

    def sabotage(step):
        (tmp_path / "student_best.new").touch() if step in (2, 3) else (tmp_path / "student_best.new").unlink(True)

    return sabotage


def test_best_student_that_cannot_be_written_leaves_the_one_before_and_is_tried_again(
    keep_best, exported, tmp_path, no_room, caplog
):
    best = keep_best("max:m", on_save_failure="continue")
    for step in range(1, 5):
        no_room(step)
        play(best, [float(step)], first=step)

    assert exported == [1, 4]
    assert best.state_dict()["best"]["value"] == 4.0
    assert (tmp_path / "student_best" / "weights").read_text() == "4"
    assert len(caplog.messages) == 2
    assert caplog.messages[0] == (
        f"the best student, of step 2, could not be written to {tmp_path / 'student_best'} (Not a directory); that of "
        "step 1 stays, and the run goes on"
    )


def test_best_student_that_cannot_be_written_ends_a_run_that_was_asked_to_stop(keep_best, exported, no_room):
    best = keep_best("max:m")
    play(best, [1.0])
    no_room(2)

    with pytest.raises(
        SaveError, match=r"of step 2, could not be .*\(Not a directory\); make room, or go on without by"
    ):
        play(best, [2.0], first=2)
    assert best.state_dict()["best"]["value"] == 1.0
