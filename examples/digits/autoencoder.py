"""An SD3-shaped AutoencoderKL (factor 8, 16 channels), trained on the digits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from digits import IMAGE_SIZE, to_image
from torch import Tensor
from torch.nn import functional as F

Report = Callable[[str], None]
KL_WEIGHT = 3e-4  # leaves a posterior wide enough for a smooth latent space, and the picture sharp


def build_autoencoder() -> Any:
    """Four blocks (factor 8), 16 latent channels, no quantisation convolutions: SD3's layout, 0.1 M parameters."""
    from diffusers import AutoencoderKL

    widths = (8, 16, 24, 32)
    return AutoencoderKL(
        sample_size=IMAGE_SIZE,
        block_out_channels=widths,
        down_block_types=("DownEncoderBlock2D",) * len(widths),
        up_block_types=("UpDecoderBlock2D",) * len(widths),
        layers_per_block=1,
        norm_num_groups=8,
        latent_channels=16,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def train_autoencoder(ink: Tensor, steps: int, report: Report, batch: int = 16, lr: float = 3e-3) -> Any:
    """Squared error plus a small KL on images of ink [N, 8, 8], each latent channel held at mean 0 and variance 1."""
    vae = build_autoencoder()
    optimizer = torch.optim.AdamW(vae.parameters(), lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        image = to_image(ink[torch.randint(len(ink), (batch,))])
        posterior = vae.encode(image).latent_dist
        latent = posterior.sample()
        error = F.mse_loss(vae.decode(latent).sample, image)
        std, mean = torch.std_mean(latent, dim=(0, 2, 3))
        # One scaling_factor serves all channels, so training makes the channels alike.
        moments = mean.square().mean() + (std - 1).square().mean()
        loss = error + KL_WEIGHT * posterior.kl().mean() / latent[0].numel() + 0.01 * moments
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps - 1:
            report(f"autoencoder {step:5d}/{steps}  squared error {error.item():.5f}  PSNR {psnr(error):.1f} dB")
    return vae.eval().requires_grad_(False)


def psnr(squared_error: Tensor) -> float:
    """Peak signal to noise in dB of images whose range is 2 ([-1, 1])."""
    return (10 * torch.log10(4 / squared_error.detach())).item()


@torch.no_grad()
def encode(vae: Any, ink: Tensor) -> tuple[Tensor, Tensor]:
    """Posterior mean and std, each [N, 16, 8, 8], of the images of ink, as the VAE gives them (not yet scaled)."""
    parts = [vae.encode(to_image(rows)).latent_dist for rows in ink.split(128)]
    return torch.cat([p.mean for p in parts]), torch.cat([p.std for p in parts])


@torch.no_grad()
def reconstruction_psnr(vae: Any, ink: Tensor) -> float:
    """PSNR in dB over the images of ink, through the posterior's mean."""
    mean, _ = encode(vae, ink)
    return psnr(F.mse_loss(vae.decode(mean).sample, to_image(ink)))


def scaled_latents(vae: Any, ink: Tensor) -> tuple[Tensor, Tensor]:
    """Posterior mean and std [N, 16, 8, 8] as the transformer sees them: mean 0, standard deviation 1 over the data.

    Sets the autoencoder's shift_factor and scaling_factor so that it is so.
    """
    mean, std = encode(vae, ink)
    spread = (mean.var() + std.square().mean()).sqrt()
    vae.register_to_config(shift_factor=round(mean.mean().item(), 5), scaling_factor=round(1 / spread.item(), 5))
    return (mean - vae.config.shift_factor) * vae.config.scaling_factor, std * vae.config.scaling_factor
