"""Backward simulation: sample as at inference, stop at the step to be trained (DMD2, section 4.5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from miles_dmd.equations import consistency_renoise_step, ode_euler_step, velocity_to_x0
from miles_dmd.modalities.diffusion.batch import Cond
from miles_dmd.modalities.diffusion.denoiser import Denoiser
from miles_dmd.network import noise

Solver = Literal["renoise", "euler"]


class Stopped(NamedTuple):
    latents: Tensor
    """[B, C, H, W] fp32, x_k."""
    sigma: Tensor
    """[B] fp32, sigma_k."""
    clean: Tensor
    """[B, C, H, W] fp32, the clean prediction at step k."""


@torch.no_grad()
def sample_until(
    model: Denoiser,
    cond: Cond,
    *,
    seeds: Sequence[int],
    stop_steps: Sequence[int],
    sigmas: Sequence[float],
    solver: Solver,
    shape: Sequence[int],
    device: torch.device,
) -> Stopped:
    """Run sample b for ``stop_steps[b] + 1`` forwards over the grid ``sigmas`` (largest first; the last goes to 0).

    Each sample draws from one CPU generator of its own: initial latents first, then one tensor per re-noised step, in
    order. A sample that has stopped leaves the batch, so that forwards beyond its stop step never run.
    """
    if bad := [k for k in stop_steps if not 0 <= k < len(sigmas)]:
        raise ValueError(f"stop steps {bad} lie outside [0, {len(sigmas) - 1}]")
    own = [noise.from_seed(seed) for seed in seeds]
    x = noise.normal(own, shape).to(device)
    latents, clean = torch.empty_like(x), torch.empty_like(x)
    running = list(range(len(seeds)))
    for step, level in enumerate(sigmas):
        sigma = x.new_full((len(running),), level)
        rows = torch.tensor(running)
        velocity = model.velocity(x, sigma, {name: value[rows.to(value.device)] for name, value in cond.items()})
        x0 = velocity_to_x0(x, velocity, sigma)
        stops = torch.tensor([stop_steps[row] == step for row in running])
        latents[rows[stops]], clean[rows[stops]] = x[stops], x0[stops]
        running = [row for row in running if stop_steps[row] > step]
        if not running:
            break
        x = _step(
            x[~stops], x0[~stops], velocity[~stops], level, sigmas[step + 1], solver, [own[row] for row in running]
        )
    return Stopped(latents, torch.tensor([sigmas[k] for k in stop_steps], device=device), clean)


def _step(
    x: Tensor, x0: Tensor, velocity: Tensor, level: float, next_level: float, solver: Solver, own: list[torch.Generator]
) -> Tensor:
    to = x.new_full((len(x),), next_level)
    if solver == "euler":
        return ode_euler_step(x, velocity, x.new_full((len(x),), level), to)
    return consistency_renoise_step(x0, noise.normal(own, x.shape[1:]).to(x.device), to)
