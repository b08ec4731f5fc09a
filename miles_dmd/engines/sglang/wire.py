"""Request and response format of one sample, validated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgpack
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from miles_dmd.engines.sglang.families import check_grid
from miles_dmd.errors import EngineMisanswer

PROTOCOL = 1
"""Version of the plugin's requests and answers (sglang_plugin/)."""
ROLLOUT = "/rollout/generate"
STOP_KEY = "miles_dmd_stop_step"
TRAIN_TIMESTEPS = 1000
SOLVERS = {"renoise": "cps", "euler": "ode"}
"""Ours -> SGLang's. CPS at noise level 1 is the re-noise sampler: its deterministic noise term vanishes exactly."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters that all samples of a run have in common."""

    sigmas: tuple[float, ...]
    solver: Literal["renoise", "euler"]
    height: int
    width: int
    shape: tuple[int, ...]
    text_length: int | None
    grid_cure: str
    """Cure for a server whose grid is another one."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    text: str
    seed: int
    stop_step: int
    stops: bool
    """True if the server stops there; else all N steps run and step k is kept of them."""


@dataclass(frozen=True)
class Sample:
    latents: Tensor
    """[C, H, W] fp32, x_k."""
    clean: Tensor
    """[C, H, W] fp32."""
    forwards: int
    updates: int | None
    """Weight updates that the server has had since it started; None where it does not say."""


def request_body(sampling: Sampling, ask: Ask) -> dict[str, Any]:
    k = ask.stop_step
    extra: dict[str, Any] = {}
    if sampling.text_length is not None:
        extra["max_sequence_length"] = sampling.text_length
    if ask.stops:
        extra["diffusers_kwargs"] = {STOP_KEY: k}
    return {
        "prompt": ask.text,
        "seed": ask.seed,
        "generator_device": "cpu",
        "width": sampling.width,
        "height": sampling.height,
        "num_inference_steps": len(sampling.sigmas),
        "num_outputs_per_prompt": 1,  # of more, each one's generator would draw for all
        "guidance_scale": 1.0,
        "rollout": True,
        "rollout_sde_type": SOLVERS[sampling.solver],
        "rollout_noise_level": 1.0,
        "rollout_log_prob_no_const": True,  # the last step has no noise, and its log-probability no value
        "rollout_debug_mode": not ask.stops,  # brings the network's outputs, of which x0 is made
        "rollout_return_dit_trajectory": True,
        "rollout_return_step_indices": [k, k + 1] if ask.stops else [k],
        "suppress_logs": True,
        "extra_sampling_params": extra,
    }


def read_answer(body: bytes, sampling: Sampling, ask: Ask, server: str) -> Sample:
    """Raises EngineMisanswer that names the server and the field."""
    answer = _Fields(_only(_unpacked(body, server), server), server)
    for name, wanted in (("prompt", ask.text), ("seed", ask.seed)):
        if answer.value(name) != wanted:
            raise answer.wrong(name, f"is {answer.value(name)!r}, asked was {wanted!r}")
    sigmas = answer.tensor("dit_trajectory.sigmas").tolist()
    check_grid(sigmas, sampling.sigmas, server, sampling.grid_cure)
    if ask.stops:
        return _stopped(answer, sampling, ask)
    return _captured(answer, sampling, ask, sigmas[ask.stop_step])


def read_conditions(body: bytes, shapes: Mapping[str, tuple[int, ...]], server: str) -> dict[str, Tensor]:
    """Embeddings of a request's prompt: name -> embedding, of these shapes. Raises as ``read_answer``."""
    answer = _Fields(_only(_unpacked(body, server), server), server)
    return {name: answer.tensor(f"denoising_env.pos_cond_kwargs.{name}", shape) for name, shape in shapes.items()}


def _stopped(answer: _Fields, sampling: Sampling, ask: Ask) -> Sample:
    receipt = answer.tensor("generated_output").flatten().tolist()
    if len(receipt) != 4 or receipt[0] != PROTOCOL:
        raise answer.wrong("generated_output", f"is no receipt of protocol {PROTOCOL}; is our plugin still there?")
    _, stop_step, forwards, updates = map(int, receipt)
    if (stop_step, forwards) != (ask.stop_step, ask.stop_step + 1):
        raise answer.wrong(
            "generated_output", f"tells of {forwards} forwards to step {stop_step}, asked {ask.stop_step}"
        )
    latents, clean = _latents(answer, sampling, labels=(_timestep(sampling, ask), 0.0))
    return Sample(latents, clean, forwards, updates)


def _captured(answer: _Fields, sampling: Sampling, ask: Ask, sigma: float) -> Sample:
    (latents,) = _latents(answer, sampling, labels=(_timestep(sampling, ask),))
    field = "rollout_debug_tensors.rollout_model_outputs"
    outputs = answer.tensor(field, (len(sampling.sigmas), *sampling.shape)).float()
    return Sample(latents, latents - sigma * outputs[ask.stop_step], len(sampling.sigmas), None)


def _latents(answer: _Fields, sampling: Sampling, labels: Sequence[float]) -> Tensor:
    latents = answer.tensor("dit_trajectory.latents", (len(labels), *sampling.shape)).float()
    found = answer.tensor("dit_trajectory.timesteps", (len(labels),)).tolist()
    if any(abs(a - b) > 0.5 for a, b in zip(found, labels, strict=True)):
        raise answer.wrong("dit_trajectory.timesteps", f"is {found}, for latents of {list(labels)}")
    return latents


def _timestep(sampling: Sampling, ask: Ask) -> float:
    return sampling.sigmas[ask.stop_step] * TRAIN_TIMESTEPS


def _unpacked(body: bytes, server: str) -> Any:
    try:
        return msgpack.unpackb(body)
    except (ValueError, msgpack.UnpackException) as error:
        raise EngineMisanswer(f"{server}: the answer of {len(body)} bytes is no whole msgpack: {error}") from error


def _only(answers: Any, server: str) -> dict[str, Any]:
    if not (isinstance(answers, list) and len(answers) == 1 and isinstance(answers[0], dict)):
        count = len(answers) if isinstance(answers, list) else "no list of"
        raise EngineMisanswer(f"{server}: {count} samples came, one was asked for")
    return answers[0]


@dataclass(frozen=True)
class _Fields:
    """Fields of an answer by dotted name; every failure names the server and the field."""

    content: dict[str, Any]
    server: str

    def wrong(self, name: str, what: str) -> EngineMisanswer:
        return EngineMisanswer(f"{self.server}: field {name} {what}")

    def value(self, name: str) -> Any:
        found: Any = self.content
        for part in name.split("."):
            if not isinstance(found, dict) or found.get(part) is None:
                raise self.wrong(name, "is missing")
            found = found[part]
        return found

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        found = self.value(name)
        if not isinstance(found, dict) or not isinstance(found.get("data"), bytes):
            raise self.wrong(name, "holds no tensor")
        try:
            tensor = load(found["data"])["t"]
        except (SafetensorError, KeyError) as error:
            raise self.wrong(name, f"cannot be read: {error}") from error
        if shape is not None and tuple(tensor.shape) != shape:
            raise self.wrong(name, f"has shape {tuple(tensor.shape)}, expected {shape}")
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise self.wrong(name, "holds numbers that are not finite")
        return tensor
