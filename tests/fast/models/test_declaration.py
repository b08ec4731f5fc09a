"""The torch-free declaration of SD3 against diffusers' own classes."""

import json
import subprocess
import sys

import pytest
import torch
from diffusers import SD3Transformer2DModel

from miles_dmd.errors import ConfigError
from miles_dmd.models.sd3 import family, max_pixels
from miles_dmd.pipelines.components import T5, Clip, clip_parameters, t5_parameters

SD35_LARGE = {
    "num_layers": 38,
    "num_attention_heads": 38,
    "caption_projection_dim": 2432,
    "qk_norm": "rms_norm",
    "pos_embed_max_size": 192,
}
SD3_MEDIUM = {"num_attention_heads": 24, "num_layers": 24, "caption_projection_dim": 1536, "pos_embed_max_size": 192}
TINY = {
    "attention_head_dim": 8,
    "caption_projection_dim": 32,
    "in_channels": 4,
    "joint_attention_dim": 24,
    "num_attention_heads": 4,
    "num_layers": 3,
    "pooled_projection_dim": 40,
    "pos_embed_max_size": 8,
    "sample_size": 8,
}


@pytest.mark.parametrize(
    "config",
    [
        SD35_LARGE,
        SD3_MEDIUM,
        TINY,
        {**TINY, "qk_norm": "layer_norm", "dual_attention_layers": [2]},
        {**TINY, "qk_norm": "rms_norm", "num_layers": 1, "patch_size": 1, "out_channels": None},
    ],
)
def test_parameters_are_named_and_shaped_as_diffusers_builds_them(config):
    with torch.device("meta"):
        network = SD3Transformer2DModel.from_config(config)

    assert family.parameters(config) == {name: tuple(value.shape) for name, value in network.named_parameters()}


def test_the_formula_counts_the_real_model(sd35_medium_config, tmp_path):
    with torch.device("meta"):
        network = SD3Transformer2DModel.from_config(sd35_medium_config)

    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text(json.dumps(sd35_medium_config))
    counted = family.count_parameters(tmp_path)

    assert counted == sum(weight.numel() for weight in network.parameters()) == 2_243_171_520


@pytest.mark.parametrize("gated", ["gated-gelu", "relu"])
def test_encoders_marks_are_what_transformers_builds(gated):
    """All of them but T5's table of words, which files hold under one of two names."""
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

    with torch.device("meta"):
        short = CLIPTextModelWithProjection(CLIPTextConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=3))
        long = T5EncoderModel(T5Config(d_model=32, num_layers=3, feed_forward_proj=gated))

    ours = (
        clip_parameters(Clip(hidden_size=32, num_hidden_layers=3)),
        t5_parameters(T5(d_model=32, num_layers=3, feed_forward_proj=gated)),
    )

    for network, found in zip((short, long), ours, strict=True):
        shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
        assert shapes | found == shapes
        assert {name for name in shapes.keys() - found.keys() if "position_ids" not in name} <= {
            "shared.weight", "encoder.embed_tokens.weight"
        }  # fmt: skip


def test_an_unknown_norm_is_refused():
    with pytest.raises(ConfigError, match="qk_norm 'batch_norm'"):
        family.parameters({**TINY, "qk_norm": "batch_norm"})


def test_sizes_follow_from_the_configuration(configuration_only):
    assert family.pixel_multiple(configuration_only) == 16
    assert family.default_pixels(configuration_only) == (1024, 1024)
    assert max_pixels(configuration_only) == 384 * 16


@pytest.mark.parametrize(("tokenizer", "length"), [(512, 256), (12, 12), (int(1e30), 256), (None, 256)])
def test_the_text_is_as_long_as_the_pipeline_makes_it(configuration_only, tokenizer, length):
    config = {} if tokenizer is None else {"model_max_length": tokenizer}
    (configuration_only / "tokenizer_3" / "tokenizer_config.json").write_text(json.dumps(config))

    assert family.default_max_sequence_length(configuration_only) == length


def test_the_declaration_knows_no_torch():
    code = "import sys, miles_dmd.models.sd3; print('torch' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "False"
