"""JSON configurations of an SD3 pipeline directory as types, with diffusers' defaults."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from miles_dmd.config.values import Natural, Positive, Range
from miles_dmd.errors import ConfigError
from miles_dmd.pipelines.components import T5, Clip, Layers, Size, Tokenizer, Vae, read_clip, read_t5, read_vae
from miles_dmd.pipelines.documents import read_config

TRAIN_TIMESTEPS = 1000
"""Timestep at sigma = 1 of the network's time embedding."""
CLIP_FOLDERS = ("text_encoder", "text_encoder_2")
CLASSES: Mapping[str, tuple[str, ...]] = {
    "transformer": ("SD3Transformer2DModel",),
    "vae": ("AutoencoderKL",),
    "scheduler": ("FlowMatchEulerDiscreteScheduler", "FlowMatchLCMScheduler", "FlowMatchHeunDiscreteScheduler"),
    "tokenizer": ("CLIPTokenizer", "CLIPTokenizerFast"),
    "tokenizer_2": ("CLIPTokenizer", "CLIPTokenizerFast"),
    "tokenizer_3": ("T5Tokenizer", "T5TokenizerFast"),
    "text_encoder": ("CLIPTextModelWithProjection",),
    "text_encoder_2": ("CLIPTextModelWithProjection",),
    "text_encoder_3": ("T5EncoderModel",),
}
"""component -> what model_index.json may call it."""


@dataclass(frozen=True)
class Transformer:
    """SD3Transformer2DModel."""

    _class_name: Literal["SD3Transformer2DModel"] = "SD3Transformer2DModel"
    sample_size: Size = 128
    patch_size: Annotated[int, Range(1, 64)] = 2
    in_channels: Size = 16
    num_layers: Layers = 18
    attention_head_dim: Size = 64
    num_attention_heads: Size = 18
    joint_attention_dim: Size = 4096
    caption_projection_dim: Size = 1152
    pooled_projection_dim: Size = 2048
    out_channels: Size | None = 16
    pos_embed_max_size: Size = 96
    dual_attention_layers: tuple[Natural, ...] = ()
    qk_norm: Literal["rms_norm", "layer_norm"] | None = None

    @property
    def width(self) -> int:
        return self.num_attention_heads * self.attention_head_dim


@dataclass(frozen=True)
class Scheduler:
    _class_name: Literal[
        "FlowMatchEulerDiscreteScheduler", "FlowMatchLCMScheduler", "FlowMatchHeunDiscreteScheduler"
    ] = "FlowMatchEulerDiscreteScheduler"
    shift: Positive = 1.0
    num_train_timesteps: Annotated[int, Range(TRAIN_TIMESTEPS, TRAIN_TIMESTEPS)] = TRAIN_TIMESTEPS


def transformer(directory: Path) -> Transformer:
    return read_config(Transformer, directory / "transformer" / "config.json")


def vae(directory: Path) -> Vae:
    return read_vae(directory / "vae" / "config.json")


def scheduler(directory: Path) -> Scheduler:
    return read_config(Scheduler, directory / "scheduler" / "scheduler_config.json")


def clip_length(directory: Path) -> int:
    """Tokens that both CLIP encoders read, always: the pipeline pads to the length of the first one's tokenizer."""
    return read_config(Tokenizer, directory / "tokenizer" / "tokenizer_config.json").model_max_length


def tokenizer(directory: Path) -> Tokenizer:
    """T5's, the only one whose length is a choice."""
    return read_config(Tokenizer, directory / "tokenizer_3" / "tokenizer_config.json")


def clip(directory: Path, folder: str) -> Clip:
    return read_clip(directory / folder / "config.json")


def t5(directory: Path) -> T5:
    return read_t5(directory / "text_encoder_3" / "config.json")


def check(directory: Path) -> None:
    """Raises ConfigError for a value of another type, and for components that do not fit each other."""
    network, decoder = transformer(directory), vae(directory)
    scheduler(directory)
    for number in ("", "_2", "_3"):
        read_config(Tokenizer, directory / f"tokenizer{number}" / "tokenizer_config.json")
    pooled = sum(clip(directory, folder).projection_dim for folder in CLIP_FOLDERS)
    if decoder.shift_factor is None:
        raise ConfigError(
            f"{directory / 'vae' / 'config.json'}: has no shift_factor, and latents of this family are decoded with "
            "one; name a complete pipeline"
        )
    for folder in CLIP_FOLDERS:
        if (length := clip_length(directory)) > (positions := clip(directory, folder).max_position_embeddings):
            raise ConfigError(
                f"{directory / 'tokenizer' / 'tokenizer_config.json'}: model_max_length {length:,} is more than the "
                f"max_position_embeddings of {folder}, {positions}; download both again from one place"
            )
    for name, here, other, there in (
        ("in_channels", network.in_channels, "latent_channels of vae", decoder.latent_channels),
        ("out_channels", network.out_channels, "in_channels", network.in_channels),
        ("caption_projection_dim", network.caption_projection_dim, "heads times attention_head_dim", network.width),
        ("pooled_projection_dim", network.pooled_projection_dim, "projection_dim of both CLIP encoders", pooled),
        ("joint_attention_dim", network.joint_attention_dim, "d_model of text_encoder_3", t5(directory).d_model),
    ):
        if here is not None and here != there:
            raise ConfigError(
                f"{directory / 'transformer' / 'config.json'}: {name} {here} does not fit {other}, {there}; name a "
                "directory whose components belong together"
            )


def shared(directory: Path) -> Mapping[str, Any]:
    """Latents and text, which go from network to network."""
    network, decoder = transformer(directory), vae(directory)
    return {
        "latent channels": network.in_channels,
        "pixels to a latent": decoder.factor,
        "scaling_factor of latents": decoder.scaling_factor,
        "shift_factor of latents": decoder.shift_factor,
        "joint_attention_dim of text": network.joint_attention_dim,
        "pooled_projection_dim of text": network.pooled_projection_dim,
    }
