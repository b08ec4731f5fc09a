"""Stable Diffusion 3 and 3.5, any size: what a pipeline directory of this family is, read from its JSON files.

Esser et al. 2024, "Scaling Rectified Flow Transformers" (arXiv 2403.03206); diffusers' SD3Transformer2DModel.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles_dmd.config.checkpoints import read_json
from miles_dmd.contracts.family import ModelFamily
from miles_dmd.errors import ConfigError

PIPELINE_TEXT_LENGTH = 256
"""T5 tokens that StableDiffusion3Pipeline uses unless told otherwise, whatever the tokenizer allows."""
DEFAULTS: Mapping[str, Any] = {
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "num_layers": 18,
    "attention_head_dim": 64,
    "num_attention_heads": 18,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 1152,
    "pooled_projection_dim": 2048,
    "out_channels": 16,
    "pos_embed_max_size": 96,
    "dual_attention_layers": (),
    "qk_norm": None,
}
"""SD3Transformer2DModel's own, for keys that an older config.json does not have."""
_TIME_CHANNELS = 256


def count_parameters(config: Mapping[str, Any]) -> int:
    """Of the transformer, exactly, from its config.json. The position table is a buffer and does not count."""
    c = {**DEFAULTS, **config}
    dim = c["num_attention_heads"] * c["attention_head_dim"]
    out_channels = c["in_channels"] if c["out_channels"] is None else c["out_channels"]
    embeddings = (
        _linear(c["in_channels"] * c["patch_size"] ** 2, dim)
        + _linear(_TIME_CHANNELS, dim)
        + _linear(c["pooled_projection_dim"], dim)
        + 2 * _linear(dim, dim)
        + _linear(c["joint_attention_dim"], c["caption_projection_dim"])
    )
    dual = set(c["dual_attention_layers"])
    last = c["num_layers"] - 1
    norms = _norm_size(c["qk_norm"], c["attention_head_dim"])
    blocks = sum(_block(dim, norms, dual=layer in dual, last=layer == last) for layer in range(c["num_layers"]))
    head = _linear(dim, 2 * dim) + _linear(dim, c["patch_size"] ** 2 * out_channels)
    return embeddings + blocks + head


def buffer_bytes(config: Mapping[str, Any]) -> int:
    """The fp32 table of positions: pos_embed_max_size squared rows (0.84 GiB in SD3.5-Medium)."""
    c = {**DEFAULTS, **config}
    return int(4 * c["pos_embed_max_size"] ** 2 * c["num_attention_heads"] * c["attention_head_dim"])


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


def _norm_size(qk_norm: str | None, head_dim: int) -> int:
    """Of the norms of one attention's queries and keys."""
    sizes = {None: 0, "rms_norm": 2 * head_dim, "layer_norm": 4 * head_dim}
    if qk_norm not in sizes:
        raise ConfigError(f"transformer/config.json: qk_norm {qk_norm!r} is none of {', '.join(map(str, sizes))}")
    return sizes[qk_norm]


def pixel_multiple(checkpoint: Path) -> int:
    """Pixels along a side of one patch: the VAE's factor times the transformer's patch."""
    return _vae_factor(checkpoint) * int(_transformer(checkpoint)["patch_size"])


def default_pixels(checkpoint: Path) -> tuple[int, int]:
    """(height, width) that the pipeline itself samples."""
    side = _transformer(checkpoint)["sample_size"] * _vae_factor(checkpoint)
    return side, side


def max_pixels(checkpoint: Path) -> int:
    """Longest side that the position table reaches."""
    return int(_transformer(checkpoint)["pos_embed_max_size"]) * pixel_multiple(checkpoint)


def default_max_sequence_length(checkpoint: Path) -> int:
    """T5 tokens: the pipeline's own, unless the tokenizer is shorter."""
    tokenizer = read_json(checkpoint / "tokenizer_3" / "tokenizer_config.json")
    return min(PIPELINE_TEXT_LENGTH, int(tokenizer.get("model_max_length", PIPELINE_TEXT_LENGTH)))


def _transformer(checkpoint: Path) -> Mapping[str, Any]:
    return {**DEFAULTS, **read_json(checkpoint / "transformer" / "config.json")}


def _vae_factor(checkpoint: Path) -> int:
    """Each of the VAE's levels but the last halves the image."""
    channels = read_json(checkpoint / "vae" / "config.json").get("block_out_channels", [64])
    return int(2 ** (len(channels) - 1))


family = ModelFamily(
    name="sd3",
    pipeline="StableDiffusion3Pipeline",
    components=(
        "transformer",
        "vae",
        "scheduler",
        "tokenizer",
        "tokenizer_2",
        "tokenizer_3",
        "text_encoder",
        "text_encoder_2",
        "text_encoder_3",
    ),
    network_component="transformer",
    shard_blocks=("JointTransformerBlock",),
    count_parameters=count_parameters,
    pixel_multiple=pixel_multiple,
    default_pixels=default_pixels,
    max_pixels=max_pixels,
    default_max_sequence_length=default_max_sequence_length,
    buffer_bytes=buffer_bytes,
    torch_module="miles_dmd.models.sd3.network",
)
