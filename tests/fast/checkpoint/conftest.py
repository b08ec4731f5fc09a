"""Checkpoints of the smallest digits run, written by the real saver from groups that hold bytes instead of tensors."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from miles_dmd import registry
from miles_dmd.checkpoint import manifest
from miles_dmd.checkpoint.manifest import entry_of
from miles_dmd.config.alarms import alarm_thresholds
from miles_dmd.errors import SaveError
from miles_dmd.executor import GroupExecutor, StartedRun
from miles_dmd.handles import BatchHandle
from miles_dmd.hooks import SampleGrids
from miles_dmd.observe.alarms import Alarms
from miles_dmd.observe.spans import SpanLog
from miles_dmd.plan.skips import Skips
from miles_dmd.prompts import PromptSource
from miles_dmd.saving import CheckpointSaver
from miles_dmd.students import KeepBest


class FakeGroup:
    size = 1

    def __init__(self, content=b"weights", failure=None):
        self.content, self.failure, self.loaded = content, failure, []

    def weights(self, role, *, averaged):
        return f"{role}, averaged" if averaged else role

    def save(self, directory):
        if self.failure is not None:
            (directory / "half").write_bytes(b"")
            raise self.failure
        for rank in range(self.size):
            (directory / f"shard-{rank}.safetensors").write_bytes(self.content + bytes([rank]) * 100)
        return [entry_of(path, directory.parent) for path in sorted(directory.iterdir())]

    def load(self, directory):
        self.loaded.append(directory.name)


class FakeRollouts:
    def __init__(self):
        self.calls = []

    def sleep(self):
        self.calls.append("sleep")

    def update_weights(self, weights, version):
        self.calls.append(f"version {version}")

    def save_state(self, path):
        path.write_text("{}")
        return entry_of(path, path.parent)

    def save_batches(self, batches, directory):
        for number, _ in enumerate(batches):
            (directory / f"batch_{number:03d}.safetensors").write_bytes(b"samples")
        return [entry_of(path, directory.parent) for path in sorted(directory.iterdir())]

    def load_batches(self, paths, num_chunks):
        return [(path.name, num_chunks) for path in paths]


def observers(args, directory):
    """Those of a run that has something to remember."""
    alarms = Alarms(dict.fromkeys(alarm_thresholds(args), 0.5), 1)
    alarms.check({"actor/teacher_critic_gap": 0.1, "critic/loss": 2.0, "samples/diversity": 0.1})
    grids, best = SampleGrids(args, [], directory / "samples", {}), KeepBest(args, None, directory / "student_best")
    grids._remember({"spread": 2.0, "limit": 3.0})
    best._values, best._best = [1.0], {"metric": "m", "value": 2.0, "global_step": 1}
    return {"alarms": alarms, "grids": grids, "best": best, "skips": Skips()}


class Run:
    """The driver's side of a run that has just committed ``cycle`` cycles."""

    def __init__(self, args, directory: Path, cycle=2, resume=None, content=b"weights"):
        self.args, self.directory = args, directory
        self.plan = registry.load("losses", args.loss_type).plan(args)
        self.counters = self.plan.update_schedule.counters_after(cycle)
        self.groups = {"critic": FakeGroup(content), "actor": FakeGroup(content)}
        self.prompts = PromptSource(args.prompt_data, args.seed)
        self.prompts.next(12)
        self.batches = SimpleNamespace(pending=lambda: (BatchHandle((8, 9, 10, 11), 1, ()),))
        self.rollouts = FakeRollouts()
        started = StartedRun(self.groups, self.rollouts)
        self.executor = GroupExecutor(self.plan, None, started, SpanLog())
        self.executor.policy_version = 1
        self.observers = observers(args, directory)
        parts = {"executor": self.executor, "batches": self.batches, "prompts": self.prompts}
        parts["observers"] = self.observers
        self.saver = CheckpointSaver(args, directory, resume=resume, **parts)

    def after(self, cycle):
        return self.plan.update_schedule.counters_after(cycle)

    def save(self):
        return self.saver.save(self.counters)


@pytest.fixture
def make_run(make_args, tmp_path):
    def make(*flags, directory=None, **options):
        return Run(make_args(*flags), directory or tmp_path / "run", **options)

    return make


@pytest.fixture
def saved(make_run):
    """A whole checkpoint, after two cycles."""
    return make_run().save()


@pytest.fixture
def full_disk():
    return SaveError("rank 0: No space left on device")


@pytest.fixture
def rewrite():
    """Change a manifest's content; ``sound`` gives it the checksum that goes with it, as a forger would."""

    def change_manifest(directory, change, *, sound=True):
        path = directory / manifest.NAME
        content = json.loads(path.read_text())
        change(content)
        if sound:
            content.pop("sha256", None)
            content["sha256"] = manifest._digest(content)
        path.write_text(json.dumps(content))

    return change_manifest


@pytest.fixture
def forge(rewrite):
    """Change a file and let the manifest vouch for it, so that only what it says can give it away."""

    def change_file(saved, path, change):
        content = json.loads((saved / path).read_text())
        change(content)
        (saved / path).write_text(json.dumps(content))
        entry = entry_of(saved / path, saved)

        def vouch(manifest):
            (row,) = (row for row in manifest["files"] if row["path"] == path)
            row.update(size=entry.size, sha256=entry.sha256)

        rewrite(saved, vouch)

    return change_file
