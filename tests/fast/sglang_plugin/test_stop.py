"""The plugin's changes to a request, on stand-ins for the few things of sglang that it touches."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

PLUGIN = Path(__file__).parents[3] / "sglang_plugin"


@pytest.fixture
def stop(monkeypatch):
    monkeypatch.syspath_prepend(PLUGIN)
    from miles_dmd_sglang import stop

    return stop


def batch(stop_step=None, steps=4, **more):
    extra = {} if stop_step is None else {"diffusers_kwargs": {"miles_dmd_stop_step": stop_step}}
    scheduler = SimpleNamespace(order=1)
    parts = {"extra": extra, "timesteps": torch.arange(steps, 0, -1), "rollout": True, "scheduler": scheduler}
    return SimpleNamespace(**{**parts, **more})


class Controller:
    """As in 0.5.23: the step knows its index."""

    def __init__(self):
        self.log_probs = []

    def append_local_rollout_log_probs(self, log_prob_sum, log_prob_count):
        self.log_probs.append((log_prob_sum, log_prob_count))

    def flow_sde_sampling(self, batch, model_output, sample, current_sigma, next_sigma, step_index):
        return "the next state"


class Scheduler:
    """As in 0.5.22: the batch knows the loop's index."""

    def append_local_rollout_log_probs(self, batch, log_prob_sum, log_prob_count):
        batch.log_probs = (log_prob_sum, log_prob_count)

    def flow_sde_sampling(self, batch, model_output, sample, current_sigma, next_sigma, generator):
        return "the next state"


@pytest.mark.parametrize("stop_step", range(4))
def test_loop_ends_after_the_stop_step(stop, stop_step):
    request = batch(stop_step)

    stop.before_loop(None, request)

    assert request.timesteps.tolist() == [4, 3, 2, 1][: stop_step + 1]


@pytest.mark.parametrize("stop_step", [-1, 4, "1", 1.0, True])
def test_stop_step_outside_the_loop_is_refused(stop, stop_step):
    with pytest.raises(ValueError, match=r"miles_dmd: stop step .* lies outside \[0, 3\]"):
        stop.before_loop(None, batch(stop_step))


@pytest.mark.parametrize("more", [{"rollout": False}, {"scheduler": SimpleNamespace(order=2)}])
def test_what_cannot_stop_is_refused(stop, more):
    with pytest.raises(ValueError, match="only a rollout request with a first-order scheduler"):
        stop.before_loop(None, batch(1, **more))


def test_ordinary_request_is_left_as_it_is(stop):
    request = batch()
    before = dict(vars(request))

    stop.before_loop(None, request)
    stepped = stop.around_step(
        Controller.flow_sde_sampling, Controller(), batch=request, model_output=None, sample=None, current_sigma=None,
        next_sigma=None, step_index=1,
    )  # fmt: skip
    decoded = stop.around_decode(lambda stage, batch: "an image", None, request)

    assert (vars(request), stepped, decoded) == (before, "the next state", "an image")


def step(stop, owner, request, index):
    parts = {
        "batch": request, "model_output": torch.full((1, 2), 4.0), "sample": torch.full((1, 2), 5.0),
        "current_sigma": torch.tensor(0.5), "next_sigma": torch.tensor(0.0),
    }  # fmt: skip
    if isinstance(owner, Controller):
        return stop.around_step(Controller.flow_sde_sampling, owner, **parts, step_index=index)
    request._rollout_loop_step_index = index
    return stop.around_step(Scheduler.flow_sde_sampling, owner, *parts.values(), None)


@pytest.mark.parametrize("owner", [Controller(), Scheduler()], ids=["0.5.23", "0.5.22"])
def test_last_step_makes_the_clean_prediction_and_draws_nothing(stop, owner):
    request = batch(1)
    stop.before_loop(None, request)

    earlier, last = step(stop, owner, request, 0), step(stop, owner, request, 1)

    assert earlier == "the next state"
    assert last.tolist() == [[3.0, 3.0]]  # 5 - 0.5 * 4
    ((log_sum, log_count),) = owner.log_probs if isinstance(owner, Controller) else [request.log_probs]
    assert (log_sum.tolist(), log_count.tolist()) == ([0.0], [1.0])


@pytest.fixture
def output_batch(monkeypatch):
    """sglang's OutputBatch, which the plugin makes."""
    name = "sglang.multimodal_gen.runtime.pipelines_core.schedule_batch"
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType(parts[depth - 1]))
    sys.modules[name].OutputBatch = lambda **fields: SimpleNamespace(**fields)


def test_receipt_goes_in_the_place_of_an_image(stop, output_batch):
    from miles_dmd_sglang.counters import COUNTERS, around_forward

    request = batch(1, latents=torch.zeros(2, 3, dtype=torch.bfloat16), rollout_trajectory_data="data", metrics=None)
    stop.before_loop(None, request)
    for index in range(2):
        around_forward(lambda: None)
        step(stop, Controller(), request, index)

    output = stop.around_decode(None, None, request)

    assert output.output.tolist() == [[1, 1, 2, COUNTERS["updates"]]] * 2
    assert output.rollout_trajectory_data == "data"


def test_pipeline_that_did_not_stop_is_refused(stop):
    with pytest.raises(RuntimeError, match="a denoising loop of its own"):
        stop.around_decode(None, None, batch(1))


def test_updates_count_when_they_succeed(stop):
    from miles_dmd_sglang.counters import COUNTERS, around_update

    before = COUNTERS["updates"]
    around_update(lambda: (True, "done"))
    around_update(lambda: (False, "no"))

    assert COUNTERS["updates"] == before + 1


def test_noise_is_drawn_where_the_generator_is(stop):
    """The network sits on another device; "meta" stands for it."""
    owner = SimpleNamespace(generator=[torch.Generator().manual_seed(3)], noise_buffer=None)

    def draw(owner, batch, model_output):
        owner.noise_buffer = torch.randn(model_output.shape, generator=owner.generator[0], device=model_output.device)
        return owner.noise_buffer

    noise = stop.around_noise(draw, owner, batch(1), torch.zeros(2, device="meta"))

    assert (noise.device.type, owner.noise_buffer.device.type) == ("meta", "meta")
    assert stop.around_noise(draw, owner, batch(1), torch.zeros(2)).device.type == "cpu"


def test_noise_of_an_ordinary_request_is_sglangs_own(stop):
    owner = SimpleNamespace(generator=[torch.Generator()])
    velocity = torch.zeros(2, device="meta")

    assert stop.around_noise(lambda owner, batch, model_output: model_output, owner, batch(), velocity) is velocity
