"""Does the torch-free declaration of SD3 say what diffusers' own classes say?"""

import pytest
import torch
from diffusers import SD3Transformer2DModel

from miles_dmd.models.sd3 import count_parameters

SD35_MEDIUM = {
    "attention_head_dim": 64,
    "caption_projection_dim": 1536,
    "dual_attention_layers": list(range(13)),
    "in_channels": 16,
    "joint_attention_dim": 4096,
    "num_attention_heads": 24,
    "num_layers": 24,
    "out_channels": 16,
    "patch_size": 2,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 384,
    "qk_norm": "rms_norm",
    "sample_size": 128,
}
SD35_LARGE = {
    **SD35_MEDIUM,
    "num_layers": 38,
    "num_attention_heads": 38,
    "caption_projection_dim": 2432,
    "dual_attention_layers": [],
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
        SD35_MEDIUM,
        SD35_LARGE,
        SD3_MEDIUM,
        TINY,
        {**TINY, "qk_norm": "layer_norm", "dual_attention_layers": [2]},
        {**TINY, "qk_norm": "rms_norm", "num_layers": 1, "patch_size": 1, "out_channels": None},
    ],
)
def test_the_formula_counts_what_diffusers_builds(config):
    with torch.device("meta"):
        network = SD3Transformer2DModel.from_config(config)

    assert count_parameters(config) == sum(weight.numel() for weight in network.parameters())
