"""Stable Diffusion 3 and 3.5, any size: declaration, read from a pipeline directory's JSON files.

Esser et al. 2024, "Scaling Rectified Flow Transformers" (arXiv 2403.03206); diffusers' SD3Transformer2DModel.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles_dmd.config.checkpoints import from_config
from miles_dmd.contracts.family import ModelFamily
from miles_dmd.models.sd3.configs import (
    CLASSES,
    Transformer,
    check,
    marks,
    scheduler,
    shared,
    tokenizer,
    transformer,
    vae,
)

PIPELINE_TEXT_LENGTH = 256
"""T5 tokens that StableDiffusion3Pipeline uses unless told otherwise, whatever the tokenizer allows."""
_TIME_CHANNELS = 256


def count_parameters(config: Mapping[str, Any]) -> int:
    """Of the transformer, exactly, from its config.json. The position table is a buffer and does not count."""
    c = from_config(Transformer, config, "transformer/config.json")
    embeddings = (
        _linear(c.in_channels * c.patch_size**2, c.width)
        + _linear(_TIME_CHANNELS, c.width)
        + _linear(c.pooled_projection_dim, c.width)
        + 2 * _linear(c.width, c.width)
        + _linear(c.joint_attention_dim, c.caption_projection_dim)
    )
    norms, last = _NORMS[c.qk_norm] * c.attention_head_dim, c.num_layers - 1
    blocks = sum(
        _block(c.width, norms, dual=layer in c.dual_attention_layers, last=layer == last)
        for layer in range(c.num_layers)
    )
    out_channels = c.in_channels if c.out_channels is None else c.out_channels
    head = _linear(c.width, 2 * c.width) + _linear(c.width, c.patch_size**2 * out_channels)
    return embeddings + blocks + head


def buffer_bytes(config: Mapping[str, Any]) -> int:
    """The fp32 table of positions: pos_embed_max_size squared rows (0.84 GiB in SD3.5-Medium)."""
    c = from_config(Transformer, config, "transformer/config.json")
    return 4 * c.pos_embed_max_size**2 * c.width


def _block(dim: int, norms: int, *, dual: bool, last: bool) -> int:
    """Image and text stream, each modulated, normed and fed forward; the last block has no text output."""
    attention = 4 * _linear(dim, dim) + norms
    image = _linear(dim, (9 if dual else 6) * dim) + attention + (attention if dual else 0) + _feed_forward(dim)
    if last:
        return image + _linear(dim, 2 * dim) + 3 * _linear(dim, dim) + norms
    return image + _linear(dim, 6 * dim) + attention + _feed_forward(dim)


def _feed_forward(dim: int) -> int:
    return _linear(dim, 4 * dim) + _linear(4 * dim, dim)


def _linear(inputs: int, outputs: int) -> int:
    return (inputs + 1) * outputs


_NORMS: Mapping[str | None, int] = {None: 0, "rms_norm": 2, "layer_norm": 4}
"""qk_norm -> parameters of the norms of one attention's queries and keys, for each of a head's dimensions."""


def pixel_multiple(checkpoint: Path) -> int:
    """Pixels along a side of one patch: the VAE's factor times the transformer's patch."""
    return vae(checkpoint).factor * transformer(checkpoint).patch_size


def default_pixels(checkpoint: Path) -> tuple[int, int]:
    """(height, width) that the pipeline itself samples."""
    side = transformer(checkpoint).sample_size * vae(checkpoint).factor
    return side, side


def max_pixels(checkpoint: Path) -> int:
    """Longest side that the position table reaches."""
    return transformer(checkpoint).pos_embed_max_size * pixel_multiple(checkpoint)


def default_max_sequence_length(checkpoint: Path) -> int:
    """T5 tokens: the pipeline's own, unless the tokenizer is shorter."""
    return min(PIPELINE_TEXT_LENGTH, tokenizer(checkpoint).model_max_length)


def scheduler_shift(checkpoint: Path) -> float:
    return scheduler(checkpoint).shift


family = ModelFamily(
    name="sd3",
    pipeline="StableDiffusion3Pipeline",
    components=CLASSES,
    network_component="transformer",
    shard_blocks=("JointTransformerBlock",),
    check=check,
    marks=marks,
    shared=shared,
    scheduler_shift=scheduler_shift,
    count_parameters=count_parameters,
    pixel_multiple=pixel_multiple,
    default_pixels=default_pixels,
    max_pixels=max_pixels,
    default_max_sequence_length=default_max_sequence_length,
    buffer_bytes=buffer_bytes,
    saved_buffers=("pos_embed.pos_embed",),  # the sine table of diffusers' PatchEmbed: 226 M numbers in SD3.5
    torch_module="miles_dmd.models.sd3.network",
)
