"""A student is written as its source was: same dtype, and what is no parameter comes along; large ones in shards."""

import json

import pytest
import torch
from diffusers import SD3Transformer2DModel
from huggingface_hub import save_torch_state_dict

from miles_dmd import registry
from miles_dmd.network.pretrained import load_network
from miles_dmd.training import export

FAMILY = registry.load("models", "sd3")


@pytest.fixture
def sharded_source(tmp_path):
    """A bf16 transformer in several files, as large checkpoints are."""
    torch.manual_seed(0)
    network = SD3Transformer2DModel(
        sample_size=8, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=8, pos_embed_max_size=8,
    ).to(torch.bfloat16)  # fmt: skip
    folder = tmp_path / "source" / "transformer"
    folder.mkdir(parents=True)
    network.save_config(folder)
    save_torch_state_dict(network.state_dict(), folder, filename_pattern=export.WEIGHTS_NAME, max_shard_size=20_000)
    return tmp_path / "source"


def test_sharded_half_precision_weights_survive_loading_and_writing(sharded_source, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "SHARD_SIZE", 20_000)
    network = load_network(FAMILY, sharded_source)
    parameters = {name: value.detach() for name, value in network.named_parameters()}
    half = len(parameters) // 2
    buckets = [dict(list(parameters.items())[:half]), dict(list(parameters.items())[half:])]

    export._write_network(tmp_path / "written", sharded_source / "transformer", buckets)

    assert {value.dtype for value in parameters.values()} == {torch.float32}
    index = json.loads((tmp_path / "written" / "diffusion_pytorch_model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    written = SD3Transformer2DModel.from_pretrained(tmp_path / "written", dtype=torch.bfloat16).state_dict()
    source = SD3Transformer2DModel.from_pretrained(sharded_source / "transformer", dtype=torch.bfloat16).state_dict()
    assert written.keys() == source.keys()
    for name, value in source.items():
        assert torch.equal(written[name], value), name
