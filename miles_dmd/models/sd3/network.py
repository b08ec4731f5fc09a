"""Stable Diffusion 3 and 3.5 with torch: transformer, text conditions, VAE, scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from miles_dmd.modalities.diffusion import tokenizers
from miles_dmd.modalities.diffusion.batch import Cond
from miles_dmd.models.sd3.configs import TRAIN_TIMESTEPS, clip_length, transformer, vae

if TYPE_CHECKING:
    from miles_dmd.modalities.diffusion.family import DiffusionCode, Encode, Truncation
    from miles_dmd.models.sd3 import network

DECODED_AT_ONCE = 4
"""Images: at 512 pixels the VAE's widest activation is 256 MiB for each of them."""


def build_network(directory: Path) -> nn.Module:
    from diffusers import SD3Transformer2DModel

    config = SD3Transformer2DModel.load_config(str(directory), subfolder="transformer")
    return SD3Transformer2DModel.from_config(config)


def velocity(network: nn.Module, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
    # The timestep stays fp32 whatever x is: bf16 has 8 bits, and would call 750 "752".
    timestep = sigma.float() * TRAIN_TIMESTEPS
    return network(hidden_states=x, timestep=timestep, return_dict=False, **cond)[0]


def latent_shape(directory: Path, height: int, width: int) -> tuple[int, ...]:
    factor = vae(directory).factor
    return transformer(directory).in_channels, height // factor, width // factor


def open_encoder(directory: Path, *, max_sequence_length: int, dtype: torch.dtype, device: torch.device) -> Encode:
    """encoder_hidden_states [P, L, D] and pooled_projections [P, D'], by the stock pipeline's own code."""
    with tokenizers.quiet():
        from diffusers import StableDiffusion3Pipeline

        pipeline = StableDiffusion3Pipeline.from_pretrained(
            str(directory), transformer=None, vae=None, dtype=dtype, local_files_only=True, use_safetensors=True
        ).to(device)

    @torch.no_grad()
    def encode(texts: Sequence[str]) -> Cond:
        with tokenizers.quiet():
            embeds, _, pooled, _ = pipeline.encode_prompt(
                list(texts), None, None, do_classifier_free_guidance=False, max_sequence_length=max_sequence_length
            )
        return {"encoder_hidden_states": embeds.cpu(), "pooled_projections": pooled.cpu()}

    return encode


def truncations(directory: Path, texts: Sequence[str], max_sequence_length: int) -> list[Truncation]:
    clip = clip_length(directory)
    return tokenizers.truncations(directory, texts, {"": clip, "_2": clip, "_3": max_sequence_length})


def open_decoder(directory: Path, device: torch.device) -> Callable[[Tensor], Tensor]:
    from diffusers import AutoencoderKL

    # safetensors only: from_pretrained would fall back to a pickle, and reading one runs what it says
    autoencoder = AutoencoderKL.from_pretrained(
        str(directory), subfolder="vae", local_files_only=True, use_safetensors=True
    ).eval()

    @torch.no_grad()
    def decode(latents: Tensor) -> Tensor:
        autoencoder.to(device)  # only while it decodes: trainers share the device
        images = torch.cat([_decoded(autoencoder, part.to(device)).cpu() for part in latents.split(DECODED_AT_ONCE)])
        autoencoder.to("cpu")
        return ((images / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()

    return decode


def _decoded(vae: Any, latents: Tensor) -> Tensor:
    return vae.decode(latents.to(vae.dtype) / vae.config.scaling_factor + vae.config.shift_factor).sample.float()


def sampling_sigmas(directory: Path, num_steps: int, shape: Sequence[int]) -> list[float]:
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(str(directory), subfolder="scheduler")
    config, more = scheduler.config, {}
    if config.use_dynamic_shifting:
        from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift

        patch = transformer(directory).patch_size
        tokens = (shape[1] // patch) * (shape[2] // patch)
        bounds = (config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift)
        more = {"mu": calculate_shift(tokens, *bounds)}
    scheduler.set_timesteps(num_steps, **more)
    return [float(sigma) for sigma in scheduler.sigmas]


def write_scheduler(target: Path, *, directory: Path, shift: float, solver: str) -> str:
    from diffusers import FlowMatchEulerDiscreteScheduler, FlowMatchLCMScheduler

    kind = {"renoise": FlowMatchLCMScheduler, "euler": FlowMatchEulerDiscreteScheduler}[solver]
    kind(num_train_timesteps=TRAIN_TIMESTEPS, shift=shift).save_pretrained(str(target))
    return str(kind.__name__)


if TYPE_CHECKING:  # mypy compares this module, which the family names as text
    _code: DiffusionCode = network
