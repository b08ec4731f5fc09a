"""Checkpoints of the smallest digits run, written by the real saver from groups that hold bytes instead of tensors."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from miles_dmd.checkpoint import manifest
from miles_dmd.checkpoint.manifest import FORMAT, entry_of
from miles_dmd.errors import SaveError
from miles_dmd.executor import GroupExecutor, StartedRun
from miles_dmd.handles import BatchHandle
from miles_dmd.modalities.diffusion.grids import SampleGrids
from miles_dmd.observe.alarms import Alarms
from miles_dmd.observe.spans import SpanLog
from miles_dmd.plan.skips import Skips
from miles_dmd.preflight.rules import resolve
from miles_dmd.prompts import PromptSource
from miles_dmd.saving import CheckpointSaver, RunState
from miles_dmd.students import KeepBest


def safetensors(content, names, **notes):
    """A file of the format in which every tensor is ``content``."""
    size = len(content)
    header = {
        name: {"dtype": "U8", "shape": [size], "data_offsets": [number * size, (number + 1) * size]}
        for number, name in enumerate(names)
    }
    text = json.dumps({"__metadata__": notes, **header}).encode()
    return len(text).to_bytes(8, "little") + text + content * len(names)


class FakeGroup:
    """Group of one parameter that has taken ``steps`` optimizer steps."""

    size = 1

    def __init__(self, content=b"weights", failure=None, steps=0, averaged=False):
        self.content, self.failure, self.loaded = content, failure, []
        self.steps, self.averaged = steps, averaged

    def weights(self, role, *, averaged):
        return f"{role}, averaged" if averaged else role

    def save(self, directory):
        if self.failure is not None:
            (directory / "half").write_bytes(b"")
            raise self.failure
        role = "student" if self.averaged else "fake_score"
        names = ["network.w", *(["average.w"] if self.averaged else [])]
        names += ["exp_avg.w", "exp_avg_sq.w"] if self.steps else []
        names = [f"{role}.{name}" for name in names]
        for rank in range(self.size):
            (directory / f"shard-{rank}.safetensors").write_bytes(safetensors(self.content + bytes([rank]) * 9, names))
            (directory / f"rank_{rank}.json").write_text("{}")
        taken = {
            "parameters": ["w"],
            "optimizer_steps": {"w": self.steps} if self.steps else {},
            "scheduler_steps": self.steps,
            "average_steps": self.steps if self.averaged else None,
        }
        numbers = {"format": FORMAT, "ranks": self.size, "roles": {role: taken}}
        (directory / "trainer.json").write_text(json.dumps(numbers))
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
        for number, batch in enumerate(batches):
            told = json.dumps({"ids": batch.ids, "policy_version": batch.policy_version})
            (directory / f"batch_{number:03d}.safetensors").write_bytes(safetensors(b"samples", ["clean"], batch=told))
        return [entry_of(path, directory.parent) for path in sorted(directory.iterdir())]

    def load_batches(self, paths, num_chunks):
        return [(path.name, num_chunks) for path in paths]


def observers(run, directory):
    """Those of a run that has something to remember."""
    alarms = Alarms(dict.fromkeys(run.alarms, 0.5), 1)
    alarms.check({"actor/teacher_critic_gap": 0.1, "critic/loss": 2.0, "samples/diversity": 0.1})
    grids, best = SampleGrids(run.args, [], directory / "samples", {}), KeepBest(run, directory / "student_best")
    grids._remember({"spread": 2.0, "limit": 3.0})
    best.metric, best.way = "m", "max"
    best._values, best._best = [1.0], {"metric": "m", "value": 2.0, "global_step": 1}
    return {"alarms": alarms, "grids": grids, "best": best, "skips": Skips()}


class Run:
    """The driver's side of a run that has just committed ``cycle`` cycles."""

    def __init__(self, args, directory: Path, cycle=2, resume=None, content=b"weights"):
        self.args, self.directory = args, directory
        run = resolve(args)
        self.plan = run.plan
        self.counters = self.plan.update_schedule.counters_after(cycle)
        steps, version = self.counters.optimizer_steps, self.counters.global_step
        self.groups = {
            "critic": FakeGroup(content, steps=steps.get("fake_score", 0)),
            "actor": FakeGroup(content, steps=steps.get("student", 0), averaged=True),
        }
        self.prompts = PromptSource(args.prompt_data, args.seed)
        drawn = sum(steps.values()) + 1  # all that were used, and one that waits
        self.prompts.next(drawn * 4)
        waiting = BatchHandle(tuple(range(drawn * 4 - 4, drawn * 4)), version, ())
        self.batches = SimpleNamespace(pending=lambda: (waiting,))
        self.rollouts = FakeRollouts()
        self.executor = GroupExecutor(self.plan, None, StartedRun(self.groups, self.rollouts), SpanLog())
        self.executor.policy_version = version
        draws = {"size": 4, "since": 0, "batches": drawn}
        self.observers = observers(run, directory) | {"draws": SimpleNamespace(state_dict=lambda: draws)}
        state = RunState(self.executor, self.batches, self.prompts, None, self.observers)
        self.saver = CheckpointSaver(run, directory, state, resume)

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
