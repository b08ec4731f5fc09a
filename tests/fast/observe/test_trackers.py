"""Every tracker that was asked for hears of every cycle, once; one that fails is dropped; one that is not installed is
refused before the run."""

import contextlib
import resource
import sys
import types

import pytest

from miles_dmd.errors import ConfigError
from miles_dmd.observe import trackers
from miles_dmd.observe.metrics import read_metrics
from miles_dmd.observe.trackers import open_trackers

ROW = {"cycle": 3, "global_step": 2, "actor/loss": 0.5}


class FakeWandb(types.ModuleType):
    """W&B as far as it is used: runs by their id, each with the next step that it takes."""

    def __init__(self):
        super().__init__("wandb")
        self.runs = {}

    def init(self, **options):
        run = self.runs.setdefault(options["id"], FakeRun())
        run.options, run.finished = options, False
        return run


class FakeRun:
    def __init__(self):
        self.logged, self.step, self.failure = [], 0, None

    def log(self, row, step):
        if self.failure is not None:
            raise self.failure
        assert step >= self.step
        self.logged.append((row, step))
        self.step = step + 1

    def finish(self):
        self.finished = True


@pytest.fixture
def wandb(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(trackers, "find_spec", lambda name: object())
    return fake


@pytest.fixture
def no_file_grows():
    """From here on the disk is full."""

    @contextlib.contextmanager
    def full():
        unlimited = resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, unlimited))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))

    return full


def row(cycle, loss=0.5):
    return {"cycle": cycle, "actor/loss": loss}


def shown(directory):
    """Points that TensorBoard draws: (step, loss)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("actor/loss")]


def test_metrics_jsonl_is_always_written(tmp_path):
    opened = open_trackers(tmp_path / "run")
    opened.write(ROW)
    opened.close()

    assert read_metrics(tmp_path / "run" / "metrics.jsonl") == [ROW]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


def test_tensorboard_gets_every_number_at_its_cycle(tmp_path):
    opened = open_trackers(tmp_path, tensorboard=True)
    opened.write(ROW)
    opened.close()

    assert shown(tmp_path) == [(3, 0.5)]
    assert read_metrics(tmp_path / "metrics.jsonl") == [ROW]


@pytest.mark.parametrize("torn", [0, 7])
def test_cycles_that_a_resumed_run_repeats_are_shown_once(tmp_path, torn):
    """Killed after cycle 5, in the middle of its last record or not; the checkpoint is that of cycle 2."""
    killed = open_trackers(tmp_path, tensorboard=True)
    for cycle in range(1, 6):
        killed.write(row(cycle, 0.5))
    killed.close()  # flushes nothing: each row was
    (events,) = (tmp_path / "tensorboard").iterdir()
    events.write_bytes(events.read_bytes()[: -torn or None])

    resumed = open_trackers(tmp_path, tensorboard=True, done=2)
    resumed.write(row(3, 0.25))
    resumed.close()

    assert shown(tmp_path) == [(1, 0.5), (2, 0.5), (3, 0.25)]
    assert [(r["cycle"], r["actor/loss"]) for r in read_metrics(tmp_path / "metrics.jsonl")] == shown(tmp_path)


def test_wandb_gets_the_row_at_its_cycle_and_the_configuration(tmp_path, wandb):
    opened = open_trackers(tmp_path / "digits-1", wandb_project="mine", config={"lr": 1e-5})
    opened.write(ROW)
    opened.close()

    ((identity, run),) = wandb.runs.items()
    assert run.options == {
        "project": "mine",
        "name": "digits-1",
        "dir": str(tmp_path / "digits-1"),
        "config": {"lr": 1e-5},
        "id": identity,
        "resume": "allow",
    }
    assert run.logged == [(ROW, 3)]
    assert run.finished


def test_resumed_run_goes_on_in_wandb_with_what_is_not_there_yet(tmp_path, wandb):
    for cycles, done in ((range(1, 6), 0), (range(3, 8), 2)):
        opened = open_trackers(tmp_path, wandb_project="mine", done=done)
        for cycle in cycles:
            opened.write(row(cycle))
        opened.close()

    (run,) = wandb.runs.values()
    assert [step for _, step in run.logged] == [1, 2, 3, 4, 5, 6, 7]


def test_tracker_that_fails_is_dropped_with_one_warning_and_the_others_go_on(tmp_path, wandb, caplog):
    opened = open_trackers(tmp_path, tensorboard=True, wandb_project="mine")
    opened.write(row(1))
    (run,) = wandb.runs.values()
    run.failure = ConnectionError("the service is gone")
    opened.write(row(2))
    run.failure = None
    opened.write(row(3))
    opened.close()

    assert caplog.messages == [
        "--wandb-project is left out, and the run goes on without it: ConnectionError: the service is gone"
    ]
    assert [step for _, step in run.logged] == [1]
    assert shown(tmp_path) == [(1, 0.5), (2, 0.5), (3, 0.5)]
    assert [r["cycle"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_tensorboard_on_a_full_disk_is_dropped_and_rows_wait_for_room(tmp_path, no_file_grows, caplog, capfd):
    opened = open_trackers(tmp_path, tensorboard=True)
    opened.write(row(1))
    with no_file_grows():
        opened.write(row(2))
        opened.write(row(3))
        with pytest.raises(OSError, match="File too large"):
            opened.rows.sync()
    opened.write(row(4))
    opened.close()

    assert caplog.messages == [
        f"{tmp_path / 'metrics.jsonl'}: rows wait in memory until they can be written (File too large)",
        "--tensorboard is left out, and the run goes on without it: File too large",
    ]
    assert [r["cycle"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert capfd.readouterr().err == ""
    assert shown(tmp_path)[0] == (1, 0.5)


def test_rows_that_never_found_room_are_an_error_at_the_end_and_the_others_are_closed(tmp_path, wandb, no_file_grows):
    opened = open_trackers(tmp_path, wandb_project="mine")
    opened.write(row(1))
    with no_file_grows():
        opened.write(row(2))
        with pytest.raises(OSError, match="File too large"):
            opened.close()

    (run,) = wandb.runs.values()
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
