"""Every tracker that was asked for hears of every cycle; one that is not installed is refused before the run."""

import sys
import types

import pytest

from miles_dmd.errors import ConfigError
from miles_dmd.observe import trackers
from miles_dmd.observe.metrics import read_metrics
from miles_dmd.observe.trackers import Trackers, open_trackers

ROW = {"cycle": 3, "global_step": 2, "actor/loss": 0.5}


class FakeRun:
    def __init__(self, **options):
        self.options, self.logged, self.finished = options, [], False

    def log(self, row, step):
        self.logged.append((row, step))

    def finish(self):
        self.finished = True


def test_metrics_jsonl_is_always_written(tmp_path):
    opened = open_trackers(tmp_path / "run")
    opened.write(ROW)
    opened.close()

    assert read_metrics(tmp_path / "run" / "metrics.jsonl") == [ROW]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


def test_tensorboard_gets_every_number_at_its_cycle(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    opened = open_trackers(tmp_path, tensorboard=True)
    opened.write(ROW)
    opened.close()

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("actor/loss")] == [(3, 0.5)]
    assert read_metrics(tmp_path / "metrics.jsonl") == [ROW]


def test_wandb_gets_the_row_at_its_cycle_and_the_configuration(tmp_path, monkeypatch):
    runs = []
    wandb = types.ModuleType("wandb")
    wandb.init = lambda **options: runs.append(FakeRun(**options)) or runs[-1]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(trackers, "find_spec", lambda name: object())

    opened = open_trackers(tmp_path / "digits-1", wandb_project="mine", config={"lr": 1e-5})
    opened.write(ROW)
    opened.close()

    (run,) = runs
    assert run.options == {
        "project": "mine",
        "name": "digits-1",
        "dir": str(tmp_path / "digits-1"),
        "config": {"lr": 1e-5},
    }
    assert run.logged == [(ROW, 3)]
    assert run.finished


@pytest.mark.parametrize(
    ("asked", "fragments"),
    [
        ({"tensorboard": True}, ["--tensorboard", "pip install 'miles-dmd[tensorboard]'"]),
        ({"wandb_project": "mine"}, ["--wandb-project mine", "pip install 'miles-dmd[wandb]'"]),
    ],
)
def test_a_tracker_that_is_not_installed_is_refused_with_the_cure_and_nothing_is_written(
    tmp_path, monkeypatch, asked, fragments
):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)

    with pytest.raises(ConfigError) as refusal:
        open_trackers(tmp_path / "run", **asked)

    assert all(fragment in str(refusal.value) for fragment in fragments)
    assert not (tmp_path / "run").exists()


def test_several_trackers_are_one():
    class Recorder:
        def __init__(self):
            self.heard = []

        def write(self, row):
            self.heard.append(row)

        def close(self):
            self.heard.append("closed")

    recorders = [Recorder(), Recorder()]

    several = Trackers(recorders)
    several.write(ROW)
    several.close()

    assert all(recorder.heard == [ROW, "closed"] for recorder in recorders)
