"""Names and shapes of the parameters of an SD3 pipeline's networks, from their configurations, without torch.

The transformer's are all of them (diffusers' SD3Transformer2DModel); of the encoders, those of all layers, which
transformers would draw at random, without an error, where a file lacks them.
"""

from collections.abc import Mapping

from miles_dmd.models.sd3.configs import T5, Clip, Transformer, Vae

Shapes = dict[str, tuple[int, ...]]
TIME_CHANNELS = 256


def transformer_parameters(c: Transformer) -> Shapes:
    """Without the position table, which is a buffer."""
    width, last = c.width, c.num_layers - 1
    found = {
        "pos_embed.proj.weight": (width, c.in_channels, c.patch_size, c.patch_size),
        "pos_embed.proj.bias": (width,),
        **_linear("time_text_embed.timestep_embedder.linear_1", TIME_CHANNELS, width),
        **_linear("time_text_embed.timestep_embedder.linear_2", width, width),
        **_linear("time_text_embed.text_embedder.linear_1", c.pooled_projection_dim, width),
        **_linear("time_text_embed.text_embedder.linear_2", width, width),
        **_linear("context_embedder", c.joint_attention_dim, c.caption_projection_dim),
        **_linear("norm_out.linear", width, 2 * width),
        **_linear("proj_out", width, c.patch_size**2 * (c.out_channels or c.in_channels)),
    }
    for number in range(c.num_layers):
        name, dual = f"transformer_blocks.{number}", number in c.dual_attention_layers
        found |= _image_stream(name, c, dual=dual) | _text_stream(name, c, last=number == last)
    return found


def _image_stream(name: str, c: Transformer, *, dual: bool) -> Shapes:
    """Modulated by six vectors a layer, or nine where it attends to itself once more."""
    found = _linear(f"{name}.norm1.linear", c.width, (9 if dual else 6) * c.width)
    found |= _feed_forward(f"{name}.ff", c.width)
    for attention in ("attn", "attn2") if dual else ("attn",):
        for part in ("to_q", "to_k", "to_v", "to_out.0"):
            found |= _linear(f"{name}.{attention}.{part}", c.width, c.width)
        found |= _norms(f"{name}.{attention}", ("norm_q", "norm_k"), c)
    return found


def _text_stream(name: str, c: Transformer, *, last: bool) -> Shapes:
    """The last block's only feeds the attention: it has no output."""
    found = _linear(f"{name}.norm1_context.linear", c.width, (2 if last else 6) * c.width)
    found |= {} if last else _feed_forward(f"{name}.ff_context", c.width)
    for part in ("add_q_proj", "add_k_proj", "add_v_proj", *(() if last else ("to_add_out",))):
        found |= _linear(f"{name}.attn.{part}", c.width, c.width)
    return found | _norms(f"{name}.attn", ("norm_added_q", "norm_added_k"), c)


def _norms(attention: str, names: tuple[str, ...], c: Transformer) -> Shapes:
    parts: Mapping[str | None, tuple[str, ...]] = {None: (), "rms_norm": ("weight",), "layer_norm": ("weight", "bias")}
    return {f"{attention}.{name}.{part}": (c.attention_head_dim,) for name in names for part in parts[c.qk_norm]}


def _feed_forward(name: str, width: int) -> Shapes:
    return _linear(f"{name}.net.0.proj", width, 4 * width) | _linear(f"{name}.net.2", 4 * width, width)


def _linear(name: str, inputs: int, outputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def clip_parameters(c: Clip) -> Shapes:
    width = c.hidden_size
    found: Shapes = {"text_projection.weight": (c.projection_dim, width)}
    for number in range(c.num_hidden_layers):
        layer = f"text_model.encoder.layers.{number}"
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            found |= _linear(f"{layer}.self_attn.{part}", width, width)
        found |= _linear(f"{layer}.mlp.fc1", width, c.intermediate_size)
        found |= _linear(f"{layer}.mlp.fc2", c.intermediate_size, width)
        found |= _norm(f"{layer}.layer_norm1", width) | _norm(f"{layer}.layer_norm2", width)
    return found | _norm("text_model.final_layer_norm", width)


def _norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def t5_parameters(c: T5) -> Shapes:
    inner = c.num_heads * c.d_kv
    found: Shapes = {"encoder.final_layer_norm.weight": (c.d_model,)}
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
        "decoder.conv_out.weight": (3, c.block_out_channels[0], 3, 3),
    }
