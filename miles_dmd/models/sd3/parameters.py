"""Names and shapes of all parameters of SD3's transformer (diffusers' SD3Transformer2DModel), without torch."""

from collections.abc import Mapping

from miles_dmd.models.sd3.configs import Transformer
from miles_dmd.pipelines.components import Shapes, linear

TIME_CHANNELS = 256


def transformer_parameters(c: Transformer) -> Shapes:
    """Without the position table, which is a buffer."""
    width, last = c.width, c.num_layers - 1
    found = {
        "pos_embed.proj.weight": (width, c.in_channels, c.patch_size, c.patch_size),
        "pos_embed.proj.bias": (width,),
        **linear("time_text_embed.timestep_embedder.linear_1", TIME_CHANNELS, width),
        **linear("time_text_embed.timestep_embedder.linear_2", width, width),
        **linear("time_text_embed.text_embedder.linear_1", c.pooled_projection_dim, width),
        **linear("time_text_embed.text_embedder.linear_2", width, width),
        **linear("context_embedder", c.joint_attention_dim, c.caption_projection_dim),
        **linear("norm_out.linear", width, 2 * width),
        **linear("proj_out", width, c.patch_size**2 * (c.out_channels or c.in_channels)),
    }
    for number in range(c.num_layers):
        name, dual = f"transformer_blocks.{number}", number in c.dual_attention_layers
        found |= _image_stream(name, c, dual=dual) | _text_stream(name, c, last=number == last)
    return found


def _image_stream(name: str, c: Transformer, *, dual: bool) -> Shapes:
    """Modulated by six vectors a layer, or nine where it attends to itself once more."""
    found = linear(f"{name}.norm1.linear", c.width, (9 if dual else 6) * c.width)
    found |= _feed_forward(f"{name}.ff", c.width)
    for attention in ("attn", "attn2") if dual else ("attn",):
        for part in ("to_q", "to_k", "to_v", "to_out.0"):
            found |= linear(f"{name}.{attention}.{part}", c.width, c.width)
        found |= _norms(f"{name}.{attention}", ("norm_q", "norm_k"), c)
    return found


def _text_stream(name: str, c: Transformer, *, last: bool) -> Shapes:
    """The last block's only feeds the attention: it has no output."""
    found = linear(f"{name}.norm1_context.linear", c.width, (2 if last else 6) * c.width)
    found |= {} if last else _feed_forward(f"{name}.ff_context", c.width)
    for part in ("add_q_proj", "add_k_proj", "add_v_proj", *(() if last else ("to_add_out",))):
        found |= linear(f"{name}.attn.{part}", c.width, c.width)
    return found | _norms(f"{name}.attn", ("norm_added_q", "norm_added_k"), c)


def _norms(attention: str, names: tuple[str, ...], c: Transformer) -> Shapes:
    parts: Mapping[str | None, tuple[str, ...]] = {None: (), "rms_norm": ("weight",), "layer_norm": ("weight", "bias")}
    return {f"{attention}.{name}.{part}": (c.attention_head_dim,) for name in names for part in parts[c.qk_norm]}


def _feed_forward(name: str, width: int) -> Shapes:
    return linear(f"{name}.net.0.proj", width, 4 * width) | linear(f"{name}.net.2", 4 * width, width)
