"""Rollout engine and trainers share a device: the engine sleeps while they compute, and wakes once a cycle."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from miles_dmd.batches import RolloutBatches
from miles_dmd.contracts.engine import EngineType
from miles_dmd.contracts.reports import TrainReport
from miles_dmd.errors import EngineError
from miles_dmd.executor import GroupExecutor, StartedRun
from miles_dmd.handles import ScoreHandle, WeightHandle
from miles_dmd.losses.dmd2 import loss_type as dmd2
from miles_dmd.modalities.diffusion.batch import DenoisingBatch
from miles_dmd.observe.spans import SpanLog
from miles_dmd.plan import DistillationTrainerController, build_plan, requests_until_student_update
from miles_dmd.prompts import PromptSource
from miles_dmd.rollout import RolloutWorker
from miles_dmd.saving import RunState


class Engine:
    """Refuses to sample or to take weights in its sleep, as real ones do, and remembers what it was asked."""

    def __init__(self):
        self.awake, self.version, self.log, self.notes = True, 0, [], ()

    def sleep(self):
        assert self.awake
        self.awake = False
        self.log.append("sleep")

    def wake(self):
        assert not self.awake
        self.awake = True
        self.log.append("wake")

    def generate(self, requests):
        assert self.awake
        self.log.append("generate")
        empty = torch.zeros(len(requests), 0)
        return DenoisingBatch(
            ids=tuple(r.sample_id for r in requests), prompt_ids=tuple(r.prompt_id for r in requests),
            stop_steps=tuple(r.stop_step for r in requests), latents=empty, sigma=empty, clean=empty,
            policy_version=self.version, run_seed=7,
        )  # fmt: skip

    def update_weights(self, weights, version):
        assert self.awake
        self.version = version
        self.log.append("weights")


class Group:
    """A trainer that cannot have the device while the engine is awake."""

    size = 1

    def __init__(self, name, engine):
        self.name, self.engine = name, engine

    def train(self, batch, scores, roles):
        assert not self.engine.awake
        self.engine.log.append(f"{self.name} train")
        return [TrainReport(num_samples=4, metrics={"loss": 1.0})]

    def score(self, batch):
        assert not self.engine.awake
        self.engine.log.append("score")
        return ScoreHandle(self.name, ())

    def weights(self, role, *, averaged):
        return WeightHandle(())

    def load(self, directory):
        assert not self.engine.awake
        self.engine.log.append(f"{self.name} load")


@pytest.fixture
def executor_of(monkeypatch):
    """An executor over fake groups and a real rollout worker with the engine that is given."""

    def make(engine):
        plugin = ModuleType("of_this_test.plugin")
        plugin.engine = EngineType(build="of_this_test.plugin:build")
        plugin.build = lambda args, **parts: engine
        monkeypatch.setitem(sys.modules, plugin.__name__, plugin)
        worker = RolloutWorker(SimpleNamespace(rollout_engine=plugin.__name__), compute=None, prompts=None)
        config = {"model_path": "/m", "fake_update_ratio": 2, "role_storage": "actor_critic"}
        plan = build_plan("dmd2", config, {"distribution_matching"})
        groups = {name: Group(name, engine) for name in plan.groups}
        loss_type = replace(dmd2, needs={"student": {"critic": ()}})
        return GroupExecutor(plan, loss_type, StartedRun(groups, worker), SpanLog())

    return make


def test_engine_sleeps_while_trainers_load(executor_of):
    engine, anything = Engine(), SimpleNamespace(load_state_dict=lambda state: None, restore=lambda pending: None)
    driver = {"counters": {}, "prompts": {}, "pending": [], "policy_version": 3, "observers": {}}
    resume = SimpleNamespace(directory=Path("checkpoint"), driver=driver)

    RunState(executor_of(engine), anything, anything, anything, {}).restore(resume)

    assert engine.log == ["sleep", "critic load", "actor load", "wake", "weights", "sleep"]


def test_failure_while_pictures_are_drawn_is_followed_by_nothing(executor_of):
    """The run ends: whoever hangs would be asked for the student's weights once more, and be told of that instead."""
    engine = Engine()

    def sample(requests):
        raise EngineError("it does not draw")

    engine.sample = sample

    with pytest.raises(EngineError, match="it does not draw"):
        executor_of(engine).draw_student([], None)

    assert engine.log == ["weights"]


def test_engine_sleeps_while_trainers_compute_and_wakes_once_a_cycle(executor_of):
    engine = Engine()
    executor = executor_of(engine)
    args = SimpleNamespace(rollout_batch_size=4, stop_step_policy="stratified", num_inference_steps=4, seed=7)
    prompts = PromptSource(["a", "b"], 7)
    ahead = lambda request: requests_until_student_update(  # noqa: E731
        executor.plan.update_schedule, controller.counters, request, 2
    )
    controller = DistillationTrainerController(executor.plan, RolloutBatches(args, prompts, executor, ahead), executor)

    controller.run(2)

    cycle = ["sleep", "score", "actor train", "wake", "weights", "generate", "sleep", "critic train", "critic train"]
    assert engine.log == ["generate", *cycle, *cycle[1:]]
    assert engine.log.count("wake") == 2
