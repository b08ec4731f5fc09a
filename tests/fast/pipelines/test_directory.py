"""Parameter counts from safetensors headers alone, whole or in shards."""

import json

import pytest
import torch
from safetensors.torch import save_file

from miles_dmd.errors import ConfigError
from miles_dmd.pipelines.directory import require_pipeline
from miles_dmd.pipelines.weights import WEIGHTS, require_weights, safetensors_parameters


def test_a_single_file_is_counted_without_the_buffers_that_its_family_names(tmp_path):
    tensors = {"a.weight": torch.zeros(3, 4), "b": torch.zeros(()), "pos_embed.pos_embed": torch.zeros(1, 9, 2)}
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})

    assert safetensors_parameters(tmp_path, ("pos_embed.pos_embed",)) == 13
    assert safetensors_parameters(tmp_path) == 31


def test_shards_are_counted_together(tmp_path):
    save_file({"a": torch.zeros(3)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(4), "c": torch.zeros(1)}, tmp_path / "two.safetensors")
    files = {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}
    (tmp_path / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": files}))

    assert safetensors_parameters(tmp_path) == 8
    require_weights(tmp_path, "StableDiffusion3Pipeline")


def test_without_all_of_its_files_a_component_is_not_counted(tmp_path):
    (tmp_path / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))

    assert safetensors_parameters(tmp_path) is None
    with pytest.raises(ConfigError, match=r"lacks the weights .*one\.safetensors"):
        require_weights(tmp_path, "StableDiffusion3Pipeline")


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 64, (90).to_bytes(8, "little") + b"{"])
def test_a_file_that_is_not_whole_is_refused(tmp_path, content):
    (tmp_path / WEIGHTS).write_bytes(content)

    with pytest.raises(ConfigError, match=r"is no safetensors file.*download it again"):
        safetensors_parameters(tmp_path)


def test_an_index_without_files_is_refused(tmp_path):
    (tmp_path / f"{WEIGHTS}.index.json").write_text("{}")

    with pytest.raises(ConfigError, match="names no weight files"):
        safetensors_parameters(tmp_path)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", "a\\b", ""])
def test_an_index_that_leaves_its_directory_is_refused(tmp_path, name):
    (tmp_path / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": {"a": name}}))

    with pytest.raises(ConfigError, match="which is not beside it; it is not read"):
        safetensors_parameters(tmp_path)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("model_index.json", {"_class_name": "StableDiffusion3Pipeline", "../../elsewhere": ["diffusers", "Class"]}),
        ("text_encoder_3/model.safetensors.index.json", {"weight_map": {"a": "../../secret.safetensors"}}),
    ],
)
def test_a_pipeline_that_leaves_its_directory_is_refused(configuration_only, file, content):
    (configuration_only / file).write_text(json.dumps(content))

    with pytest.raises(ConfigError, match="which is not beside it; it is not read"):
        require_pipeline(configuration_only, "StableDiffusion3Pipeline", ("transformer",))
