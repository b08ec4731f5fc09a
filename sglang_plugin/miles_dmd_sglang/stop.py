"""Early stop after step k: k + 1 forwards, the clean prediction, no decoding."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from miles_dmd_sglang import PROTOCOL
from miles_dmd_sglang.counters import COUNTERS

KEY = "miles_dmd_stop_step"
"""In ``extra_sampling_params.diffusers_kwargs``, a free dictionary that is part of what may be batched together."""
_STATE = "miles_dmd"


def requested(batch: Any) -> int | None:
    """The stop step of a request, or None for an ordinary one."""
    return ((getattr(batch, "extra", None) or {}).get("diffusers_kwargs") or {}).get(KEY)


def before_loop(stage: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """Cut the loop's timesteps; the scheduler keeps its whole grid, which the steps that remain read."""
    stop = requested(batch)
    if stop is None:
        return
    steps = len(batch.timesteps)
    if type(stop) is not int or not 0 <= stop < steps:
        raise ValueError(f"miles_dmd: stop step {stop!r} lies outside [0, {steps - 1}]")
    if not batch.rollout or getattr(batch.scheduler, "order", 1) != 1:
        raise ValueError("miles_dmd: only a rollout request with a first-order scheduler can stop at a step")
    batch.timesteps = batch.timesteps[: stop + 1]
    batch.extra[_STATE] = {"forwards": COUNTERS["forwards"]}


def around_step(original: Callable[..., Any], owner: Any, *args: Any, **kwargs: Any) -> Any:
    """At the stop step, x0 = x_k - sigma_k v instead of x_{k+1}: no noise is drawn; the loop labels it timestep 0."""
    call = inspect.signature(original).bind(owner, *args, **kwargs).arguments
    batch = call["batch"]
    stop = requested(batch)
    step = call.get("step_index", getattr(batch, "_rollout_loop_step_index", None))
    if stop is None or step != stop:
        return original(owner, *args, **kwargs)
    velocity, sample = call["model_output"].float(), call["sample"].float()
    _log_probability_of_nothing(owner, batch, sample)
    batch.extra[_STATE]["stopped"] = True
    return sample - call["current_sigma"] * velocity


def _log_probability_of_nothing(owner: Any, batch: Any, sample: Any) -> None:
    """The loop collects one entry a step, also of a step that drew nothing."""
    zero, one = sample.new_zeros(len(sample)), sample.new_ones(len(sample))
    record = owner.append_local_rollout_log_probs
    takes_batch = "batch" in inspect.signature(record).parameters
    record(*((batch,) if takes_batch else ()), zero, one)


def around_noise(original: Callable[..., Any], owner: Any, batch: Any, model_output: Any, *args: Any) -> Any:
    """A generator on the CPU draws for a network that is not: sglang itself would hand it a buffer on the device.

    So a seed means the same noise whatever the server runs on. An ordinary request draws as sglang does.
    """
    if requested(batch) is None:
        return original(owner, batch, model_output, *args)
    generator = args[0] if args else owner.generator
    source = (generator[0] if isinstance(generator, list) else generator).device
    device = model_output.device
    if source.type == device.type:
        return original(owner, batch, model_output, *args)
    noise = original(owner, batch, model_output.new_empty(model_output.shape, device=source), *args)
    drawn = owner if hasattr(owner, "noise_buffer") else owner._get_rollout_session_data(batch)
    drawn.noise_buffer = drawn.noise_buffer.to(device)  # log-probabilities are computed from it, on the device
    return noise.to(device)


def around_decode(original: Callable[..., Any], stage: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """A stopped request has no image: a receipt goes in its place."""
    if requested(batch) is None:
        return original(stage, batch, *args, **kwargs)
    state = (batch.extra or {}).get(_STATE, {})
    if not state.get("stopped"):
        raise RuntimeError("miles_dmd: this pipeline has a denoising loop of its own, which does not stop at a step")
    import torch
    from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import OutputBatch

    forwards = COUNTERS["forwards"] - state["forwards"]
    receipt = torch.tensor([PROTOCOL, requested(batch), forwards, COUNTERS["updates"]], dtype=torch.int64)
    return OutputBatch(
        output=receipt.expand(len(batch.latents), -1).contiguous(),
        rollout_trajectory_data=batch.rollout_trajectory_data,
        metrics=batch.metrics,
    )
