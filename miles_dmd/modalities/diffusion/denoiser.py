"""Denoiser: velocity, clean prediction and guidance of a network of any family."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from miles_dmd.equations import standard_cfg, velocity_to_x0
from miles_dmd.modalities.diffusion.batch import Cond
from miles_dmd.modalities.diffusion.family import DiffusionCode


@dataclass(frozen=True)
class Denoiser:
    """Inputs and outputs are fp32; the network computes in ``compute_dtype``.

    Noise levels are always sigma in [0, 1], never a timestep index, so that no two schedulers can disagree on it.
    """

    family: DiffusionCode
    network: nn.Module
    compute_dtype: torch.dtype = torch.float32

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """x [B, C, H, W], sigma [B] -> v = eps - x0 [B, C, H, W] fp32."""
        cast = {name: value.to(x.device, self.compute_dtype) for name, value in cond.items()}
        return self.family.velocity(self.network, x.to(self.compute_dtype), sigma, cast).float()

    def guided_velocity(self, x: Tensor, sigma: Tensor, cond: Cond, uncond: Cond, scale: float) -> Tensor:
        """Classifier-free guidance in standard form, both branches in one call; scale 1 skips the second."""
        if scale == 1.0:
            return self.velocity(x, sigma, cond)
        both = {name: torch.cat([uncond[name], cond[name]]) for name in cond}
        without, with_prompt = self.velocity(torch.cat([x, x]), torch.cat([sigma, sigma]), both).chunk(2)
        return standard_cfg(with_prompt, without, scale)

    def clean(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """The clean prediction x0 = x - sigma * v, fp32."""
        return velocity_to_x0(x, self.velocity(x, sigma, cond), sigma)
