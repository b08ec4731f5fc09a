"""Multi-step sampling with classifier-free guidance: the teacher's samples."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from miles_dmd.equations import ode_euler_step
from miles_dmd.modalities.diffusion.batch import Cond
from miles_dmd.modalities.diffusion.denoiser import Denoiser
from miles_dmd.network import noise


@torch.no_grad()
def sample_guided(
    model: Denoiser,
    cond: Cond,
    uncond: Cond,
    *,
    scale: float,
    seeds: Sequence[int],
    sigmas: Sequence[float],
    shape: Sequence[int],
    device: torch.device,
) -> Tensor:
    """[B, C, H, W] fp32: Euler's steps of the flow over ``sigmas``, whose last is where the samples arrive: 0.

    ``scale`` is that of standard form (1 is no guidance). Sample b's initial latents come from a CPU generator of its
    own with ``seeds[b]``.
    """
    x = noise.normal([noise.from_seed(seed) for seed in seeds], shape).to(device)
    for level, next_level in pairwise(sigmas):
        sigma, to = (x.new_full((len(x),), value) for value in (level, next_level))
        x = ode_euler_step(x, model.guided_velocity(x, sigma, cond, uncond, scale), sigma, to)
    return x
