"""Text encoders and autoencoders that several families have: their configurations, and shapes of their parameters.

Of an encoder those of all layers and embeddings, which transformers would draw at random, without an error, where a
file lacks them; but not T5's table of words, which files hold under one of two names.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from miles_dmd.config.values import Positive, Range
from miles_dmd.errors import ConfigError
from miles_dmd.pipelines.documents import read_config
from miles_dmd.shown import short_repr

Shapes = dict[str, tuple[int, ...]]
MOST_LEVELS = 8
ACTIVATIONS = frozenset(
    {
        "gelu", "gelu_10", "gelu_fast", "gelu_new", "gelu_python", "gelu_pytorch_tanh", "gelu_python_tanh",
        "gelu_accurate", "hardswish", "laplace", "leaky_relu", "linear", "mish", "quick_gelu", "relu",
        "relu2", "relu6", "sigmoid", "silu", "sqrtsoftplus", "swish", "tanh", "prelu", "xielu",
    }
)  # fmt: skip
"""Functions that transformers has by name."""
Size = Annotated[int, Range(1, 65_536)]
Words = Annotated[int, Range(1, 10_000_000)]
Layers = Annotated[int, Range(1, 1000)]


@dataclass(frozen=True)
class Vae:
    """AutoencoderKL."""

    _class_name: Literal["AutoencoderKL"] = "AutoencoderKL"
    block_out_channels: tuple[Size, ...] = (64,)
    down_block_types: tuple[Literal["DownEncoderBlock2D", "AttnDownEncoderBlock2D"], ...] | None = None
    up_block_types: tuple[Literal["UpDecoderBlock2D", "AttnUpDecoderBlock2D"], ...] | None = None
    act_fn: Literal["swish", "silu", "mish", "gelu", "relu"] = "silu"
    norm_num_groups: Size = 32
    latent_channels: Size = 4
    scaling_factor: Positive = 0.18215
    shift_factor: float | None = None

    @property
    def factor(self) -> int:
        """Pixels to a latent, along a side: each of the levels but the last halves the image."""
        return 2 ** (len(self.block_out_channels) - 1)


@dataclass(frozen=True)
class Tokenizer:
    model_max_length: Annotated[int, Range(1)] = 10**30
    """transformers writes "no limit" as this, or nearly."""


@dataclass(frozen=True)
class Clip:
    """CLIPTextModelWithProjection."""

    model_type: Literal["clip_text_model", "clip"] = "clip_text_model"
    hidden_act: str = "quick_gelu"
    num_attention_heads: Size = 8
    projection_dim: Size = 512
    hidden_size: Size = 512
    intermediate_size: Size = 2048
    num_hidden_layers: Layers = 12
    max_position_embeddings: Size = 77
    vocab_size: Words = 49_408


@dataclass(frozen=True)
class T5:
    """T5EncoderModel."""

    model_type: Literal["t5"] = "t5"
    d_model: Size = 512
    d_kv: Size = 64
    d_ff: Size = 2048
    num_heads: Size = 8
    num_layers: Layers = 6
    relative_attention_num_buckets: Size = 32
    feed_forward_proj: str = "relu"


def read_vae(path: Path) -> Vae:
    """VAE as its config.json describes it. Raises ConfigError for one whose latents have no size."""
    decoder = read_config(Vae, path)
    if not 1 <= (levels := len(decoder.block_out_channels)) <= MOST_LEVELS:
        raise ConfigError(
            f"{path}: block_out_channels has {levels} levels, and there are 1 to {MOST_LEVELS}; download it again"
        )
    for blocks in ("down_block_types", "up_block_types"):
        if (found := getattr(decoder, blocks)) is not None and len(found) != levels:
            raise ConfigError(
                f"{path}: {blocks} has {len(found)} levels, and block_out_channels {levels}; download it again"
            )
    for channels in decoder.block_out_channels:
        _require_divides(path, "block_out_channels", channels, "norm_num_groups", decoder.norm_num_groups)
    return decoder


def read_clip(path: Path) -> Clip:
    """Configuration of an encoder. Raises ConfigError for one that transformers could not build."""
    encoder = read_config(Clip, path)
    _require_activation(path, "hidden_act", encoder.hidden_act, encoder.hidden_act)
    _require_divides(path, "hidden_size", encoder.hidden_size, "num_attention_heads", encoder.num_attention_heads)
    return encoder


def read_t5(path: Path) -> T5:
    """Configuration of an encoder. Raises ConfigError for one that transformers could not build."""
    encoder = read_config(T5, path)
    name = encoder.feed_forward_proj
    _require_activation(path, "feed_forward_proj", name, name.removeprefix("gated-"))
    return encoder


def _require_activation(path: Path, argument: str, written: str, function: str) -> None:
    if function not in ACTIVATIONS:
        raise ConfigError(f"{path}: {argument} {short_repr(written)} is no activation; download it again")


def _require_divides(path: Path, whole: str, size: int, parts: str, number: int) -> None:
    if size % number:
        raise ConfigError(f"{path}: {parts} {number} does not divide {whole}, {size}; download it again")


def linear(name: str, inputs: int, outputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def clip_parameters(c: Clip) -> Shapes:
    width = c.hidden_size
    embeddings = "text_model.embeddings"
    found: Shapes = {
        "text_projection.weight": (c.projection_dim, width),
        f"{embeddings}.token_embedding.weight": (c.vocab_size, width),
        f"{embeddings}.position_embedding.weight": (c.max_position_embeddings, width),
    }
    for number in range(c.num_hidden_layers):
        layer = f"text_model.encoder.layers.{number}"
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            found |= linear(f"{layer}.self_attn.{part}", width, width)
        found |= linear(f"{layer}.mlp.fc1", width, c.intermediate_size)
        found |= linear(f"{layer}.mlp.fc2", c.intermediate_size, width)
        found |= _norm(f"{layer}.layer_norm1", width) | _norm(f"{layer}.layer_norm2", width)
    return found | _norm("text_model.final_layer_norm", width)


def _norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def t5_parameters(c: T5) -> Shapes:
    inner = c.num_heads * c.d_kv
    found: Shapes = {
        "encoder.final_layer_norm.weight": (c.d_model,),
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": (
            c.relative_attention_num_buckets,
            c.num_heads,
        ),
    }
    enter = ("wi_0", "wi_1") if c.feed_forward_proj.startswith("gated") else ("wi",)
    for number in range(c.num_layers):
        attention, forward = (f"encoder.block.{number}.layer.{part}" for part in (0, 1))
        found |= {f"{attention}.SelfAttention.{part}.weight": (inner, c.d_model) for part in "qkv"}
        found |= {f"{attention}.SelfAttention.o.weight": (c.d_model, inner)}
        found |= {f"{forward}.DenseReluDense.{part}.weight": (c.d_ff, c.d_model) for part in enter}
        found |= {f"{forward}.DenseReluDense.wo.weight": (c.d_model, c.d_ff)}
        found |= {f"{part}.layer_norm.weight": (c.d_model,) for part in (attention, forward)}
    return found


def vae_parameters(c: Vae) -> Shapes:
    """The decoder's ends."""
    return {
        "decoder.conv_in.weight": (c.block_out_channels[-1], c.latent_channels, 3, 3),
        "decoder.conv_norm_out.weight": (c.block_out_channels[0],),
        "decoder.conv_norm_out.bias": (c.block_out_channels[0],),
        "decoder.conv_out.weight": (3, c.block_out_channels[0], 3, 3),
    }
