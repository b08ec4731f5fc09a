"""Requests for samples, and every way in which an answer can be another than was asked for."""

import math

import msgpack
import pytest
import torch
from safetensors.torch import save

from miles_dmd.engines.sglang.wire import Ask, Sampling, read_answer, request_body
from miles_dmd.errors import EngineMisanswer

SAMPLING = Sampling(
    sigmas=(1.0, 0.9, 0.75, 0.5), solver="renoise", height=64, width=64, shape=(2, 3, 3), text_length=12,
    grid_cure="start it with --component-paths.scheduler here",
)  # fmt: skip
STOP = Ask(text="a cat", seed=5, stop_step=1, stops=True)
CAPTURE = Ask(text="a cat", seed=5, stop_step=1, stops=False)


def tensor(value, dtype=torch.float32):
    value = torch.as_tensor(value, dtype=dtype)
    return {"__tensor__": True, "data": save({"t": value}), "shape": list(value.shape), "dtype": str(value.dtype)}


def answer(**changed):
    """Answer of a server that stops, with some fields (written with two underscores for a dot) put otherwise."""
    content = {
        "prompt": "a cat",
        "seed": 5,
        "generated_output": tensor([1, 1, 2, 7], torch.int64),
        "dit_trajectory": {
            "latents": tensor(torch.stack([torch.full((2, 3, 3), 4.0), torch.full((2, 3, 3), 3.0)])),
            "timesteps": tensor([900.0, 0.0]),
            "sigmas": tensor([1.0, 0.9, 0.75, 0.5, 0.0]),
        },
    }
    for name, value in changed.items():
        *parents, last = name.split("__")
        found = content
        for parent in parents:
            found = found[parent]
        found[last] = value
    return content


def read(content, ask=STOP):
    return read_answer(msgpack.packb([content]), SAMPLING, ask, "http://server")


def captured(**changed):
    outputs = torch.stack([torch.full((2, 3, 3), float(step)) for step in range(4)])
    return answer(
        **{
            "generated_output": None,
            "dit_trajectory__latents": tensor(torch.full((1, 2, 3, 3), 4.0)),
            "dit_trajectory__timesteps": tensor([900.0]),
            "rollout_debug_tensors": {"rollout_model_outputs": tensor(outputs)},
            **changed,
        }
    )


def test_stopped_sample_is_read():
    sample = read(answer())

    assert (sample.latents.unique().item(), sample.clean.unique().item()) == (4.0, 3.0)
    assert (sample.forwards, sample.updates) == (2, 7)


def test_captured_sample_is_made_of_the_networks_output():
    sample = read(captured(), CAPTURE)

    assert sample.latents.unique().item() == 4.0
    assert sample.clean.unique().item() == pytest.approx(4.0 - 0.9 * 1.0)
    assert (sample.forwards, sample.updates) == (4, None)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prompt": "a dog"}, "field prompt is 'a dog', asked was 'a cat'"),
        ({"seed": 6}, "field seed is 6, asked was 5"),
        ({"prompt": None}, "field prompt is missing"),
        ({"dit_trajectory": None}, "field dit_trajectory.sigmas is missing"),
        ({"dit_trajectory__latents": "text"}, "field dit_trajectory.latents holds no tensor"),
        ({"dit_trajectory__latents": {"data": b"\0\0"}}, "field dit_trajectory.latents cannot be read"),
        ({"dit_trajectory__latents": tensor(torch.zeros(2, 2, 3, 4))}, r"\(2, 2, 3, 4\), expected \(2, 2, 3, 3\)"),
        ({"dit_trajectory__latents": tensor(torch.zeros(4, 2, 3, 3))}, r"has shape \(4, 2, 3, 3\)"),
        ({"dit_trajectory__latents": tensor(torch.full((2, 2, 3, 3), math.nan))}, "numbers that are not finite"),
        ({"dit_trajectory__latents": tensor(torch.full((2, 2, 3, 3), math.inf))}, "numbers that are not finite"),
        ({"dit_trajectory__timesteps": tensor([750.0, 0.0])}, r"field dit_trajectory.timesteps is \[750.0, 0.0\]"),
        ({"dit_trajectory__sigmas": tensor([1.0, 0.858, 0.602, 0.009, 0.0])}, "samples at sigmas 1, 0.858, .*; the "
         "run wants 1, 0.9, 0.75, 0.5, 0: start it with --component-paths.scheduler here"),
        ({"dit_trajectory__sigmas": tensor([1.0, 0.9, 0.75, 0.5])}, "samples at sigmas"),
        ({"generated_output": tensor(torch.zeros(3, 8, 8))}, "field generated_output is no receipt of protocol 1"),
        ({"generated_output": tensor([2, 1, 2, 7], torch.int64)}, "field generated_output is no receipt of protocol 1"),
        ({"generated_output": tensor([1, 1, 4, 7], torch.int64)}, "tells of 4 forwards to step 1"),
        ({"generated_output": tensor([1, 2, 3, 7], torch.int64)}, "tells of 3 forwards to step 2"),
    ],
)  # fmt: skip
def test_other_answer_is_refused_with_server_and_field(changed, message):
    with pytest.raises(EngineMisanswer, match=f"^http://server.*{message}"):
        read(answer(**changed))


@pytest.mark.parametrize(
    "changed",
    [
        {"rollout_debug_tensors": None},
        {"rollout_debug_tensors__rollout_model_outputs": tensor(torch.zeros(2, 2, 3, 3))},
        {"dit_trajectory__latents": tensor(torch.zeros(2, 2, 3, 3))},
    ],
)
def test_capture_that_is_incomplete_is_refused(changed):
    with pytest.raises(EngineMisanswer, match="http://server: field"):
        read(captured(**changed), CAPTURE)


@pytest.mark.parametrize("count", [0, 2])
def test_other_number_of_samples_is_refused(count):
    with pytest.raises(EngineMisanswer, match=f"http://server: {count} samples came, one was asked for"):
        read_answer(msgpack.packb([answer()] * count), SAMPLING, STOP, "http://server")


@pytest.mark.parametrize("part", [0.0, 0.5, 0.99])
def test_half_a_body_is_refused(part):
    body = msgpack.packb([answer()])

    with pytest.raises(EngineMisanswer, match="http://server"):
        read_answer(body[: int(len(body) * part)], SAMPLING, STOP, "http://server")


def test_request_names_all_that_a_sample_depends_on():
    body = request_body(SAMPLING, STOP)

    assert (body["prompt"], body["seed"], body["num_outputs_per_prompt"]) == ("a cat", 5, 1)
    assert (body["rollout_sde_type"], body["rollout_noise_level"], body["guidance_scale"]) == ("cps", 1.0, 1.0)
    assert body["generator_device"] == "cpu"
    assert body["extra_sampling_params"] == {"max_sequence_length": 12, "diffusers_kwargs": {"miles_dmd_stop_step": 1}}
    assert body["rollout_debug_mode"] is False


def test_request_to_a_server_that_cannot_stop_keeps_one_step_of_all():
    body = request_body(SAMPLING, CAPTURE)

    assert body["rollout_return_step_indices"] == [1]
    assert body["rollout_debug_mode"] is True
    assert "diffusers_kwargs" not in body["extra_sampling_params"]
