"""Stable Diffusion 3 and 3.5, any size: declaration, read from a pipeline directory's JSON files.

Esser et al. 2024, "Scaling Rectified Flow Transformers" (arXiv 2403.03206); diffusers' SD3Transformer2DModel.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles_dmd.modalities.diffusion.family import DiffusionFamily
from miles_dmd.models.sd3.configs import (
    CLASSES,
    CLIP_FOLDERS,
    Transformer,
    check,
    clip,
    clip_length,
    scheduler,
    shared,
    t5,
    tokenizer,
    transformer,
    vae,
)
from miles_dmd.models.sd3.parameters import transformer_parameters
from miles_dmd.pipelines.components import clip_parameters, t5_parameters, vae_parameters
from miles_dmd.pipelines.documents import from_config

PIPELINE_TEXT_LENGTH = 256
"""T5 tokens that StableDiffusion3Pipeline uses unless told otherwise, whatever the tokenizer allows."""


def parameters(config: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
    return transformer_parameters(from_config(Transformer, config, "transformer/config.json"))


def buffer_bytes(config: Mapping[str, Any]) -> int:
    """The fp32 table of positions: pos_embed_max_size squared rows (0.84 GiB in SD3.5-Medium)."""
    c = from_config(Transformer, config, "transformer/config.json")
    return 4 * c.pos_embed_max_size**2 * c.width


def marks(directory: Path) -> Mapping[str, Mapping[str, tuple[int, ...]]]:
    """The VAE's ends, and all layers of the encoders."""
    encoders = {folder: clip_parameters(clip(directory, folder)) for folder in CLIP_FOLDERS}
    return {"vae": vae_parameters(vae(directory)), **encoders, "text_encoder_3": t5_parameters(t5(directory))}


def pixel_multiple(directory: Path) -> int:
    """Pixels along a side of one patch: the VAE's factor times the transformer's patch."""
    return vae(directory).factor * transformer(directory).patch_size


def default_pixels(directory: Path) -> tuple[int, int]:
    """(height, width) that the pipeline itself samples."""
    side = transformer(directory).sample_size * vae(directory).factor
    return side, side


def max_pixels(directory: Path) -> int:
    """Longest side that the position table reaches."""
    return transformer(directory).pos_embed_max_size * pixel_multiple(directory)


def default_max_sequence_length(directory: Path) -> int:
    """T5 tokens: the pipeline's own, unless the tokenizer is shorter."""
    return min(PIPELINE_TEXT_LENGTH, tokenizer(directory).model_max_length)


def condition_shapes(directory: Path, max_sequence_length: int) -> Mapping[str, tuple[int, ...]]:
    """CLIP's tokens, padded to their full number and to T5's width, before T5's; and both CLIP encoders' summaries."""
    network = transformer(directory)
    tokens = clip_length(directory) + max_sequence_length
    return {
        "encoder_hidden_states": (tokens, network.joint_attention_dim),
        "pooled_projections": (network.pooled_projection_dim,),
    }


def scheduler_shift(directory: Path) -> float:
    return scheduler(directory).shift


family = DiffusionFamily(
    name="sd3",
    pipeline="StableDiffusion3Pipeline",
    components=CLASSES,
    network_component="transformer",
    shard_blocks=("JointTransformerBlock",),
    check=check,
    marks=marks,
    shared=shared,
    scheduler_shift=scheduler_shift,
    parameters=parameters,
    pixel_multiple=pixel_multiple,
    default_pixels=default_pixels,
    max_pixels=max_pixels,
    default_max_sequence_length=default_max_sequence_length,
    condition_shapes=condition_shapes,
    buffer_bytes=buffer_bytes,
    saved_buffers=("pos_embed.pos_embed",),  # the sine table of diffusers' PatchEmbed: 226 M numbers in SD3.5
    torch_module="miles_dmd.models.sd3.network",
)
