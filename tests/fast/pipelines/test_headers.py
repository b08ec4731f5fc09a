"""Safetensors headers that the library refuses, and components that it would not, are refused at the door."""

import json
import os
import struct

import pytest
from safetensors import SafetensorError, safe_open

from miles_dmd.errors import ConfigError
from miles_dmd.pipelines.components import ACTIVATIONS
from miles_dmd.pipelines.weights import tensor_entries


def entry(start, stop, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


def written(path, header, size):
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(size))
    return path


BROKEN = {
    "negative": ({"a": entry(-8, 0), "b": entry(0, 8)}, 8),
    "unknown dtype": ({"a": entry(0, 8, dtype="F33")}, 8),
    "gap": ({"a": entry(0, 8), "b": entry(12, 20)}, 20),
    "overlap": ({"a": entry(0, 8), "b": entry(4, 12)}, 12),
    "size": ({"a": entry(0, 12)}, 12),
    "negative shape": ({"a": entry(0, 8, shape=(-1, -2))}, 8),
    "text": ({"a": entry("0", "8")}, 8),
    "fraction": ({"a": entry(0, 8, shape=(2.0,))}, 8),
    "half a byte": ({"a": entry(0, 1, shape=(3,), dtype="F4")}, 1),
}


@pytest.mark.parametrize("name", BROKEN)
def test_header_that_the_library_refuses_is_refused(tmp_path, name):
    path = written(tmp_path / "x.safetensors", *BROKEN[name])
    with pytest.raises(SafetensorError), safe_open(path, "np"):
        pass

    with pytest.raises(ConfigError, match=r"x\.safetensors is no safetensors file, or not all of it; download"):
        tensor_entries(path)


def test_header_that_the_library_takes_is_read_in_any_order(tmp_path):
    header = {"b": entry(8, 16), "none": entry(8, 8, shape=(0,)), "a": entry(0, 8), "half": entry(16, 17, dtype="F4")}
    path = written(tmp_path / "x.safetensors", header, 17)

    with safe_open(path, "np") as file:
        assert set(file.keys()) == set(header)
    assert tensor_entries(path) == header


IMPOSSIBLE = [
    ("text_encoder", "model_type", "bert"),
    ("text_encoder", "hidden_act", "gleu"),
    ("text_encoder_2", "num_attention_heads", 7),
    ("text_encoder_3", "model_type", "umt5"),
    ("text_encoder_3", "feed_forward_proj", "gated-gleu"),
    ("vae", "norm_num_groups", 7),
    ("vae", "up_block_types", ["UpBlock2D"] * 4),
    ("vae", "up_block_types", ["UpDecoderBlock2D"]),
    ("vae", "act_fn", "gleu"),
]


@pytest.mark.parametrize(("folder", "name", "value"), IMPOSSIBLE, ids=range(len(IMPOSSIBLE)))
def test_configuration_that_no_library_can_build_is_refused(run, configuration_only, folder, name, value):
    path = configuration_only / folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))

    code, lines, files = run()

    assert (code, len(lines), files) == (2, 1, [])
    assert f"{path}: {name}" in lines[0] or f"{path}: {name} " in lines[0].replace("block_out_channels", name)


def test_activations_are_those_of_transformers():
    from transformers.activations import ACT2FN

    assert set(ACT2FN) <= ACTIVATIONS


def test_swapped_tokenizers_are_refused_by_class_and_by_vocabulary(run, copy):
    (copy / "tokenizer").rename(copy / "t")
    (copy / "tokenizer_3").rename(copy / "tokenizer")
    (copy / "t").rename(copy / "tokenizer_3")
    code, lines, files = run("--hf-checkpoint", str(copy))
    assert (code, len(lines), files) == (2, 1, [])
    assert "tokenizer_class 'T5Tokenizer' is not the CLIPTokenizer that model_index.json names" in lines[0]

    for number in ("", "_3"):
        path = copy / f"tokenizer{number}" / "tokenizer_config.json"
        content = json.loads(path.read_text())
        del content["tokenizer_class"]
        path.write_text(json.dumps(content))
    code, lines, files = run("--hf-checkpoint", str(copy))
    assert (code, len(lines), files) == (2, 1, [])
    assert "vocab_size of 38: they do not belong together" in lines[0]


def test_vocabulary_beside_tokenizer_json_is_not_read_as_the_stock_loader_does_not(run, copy):
    (copy / "tokenizer" / "vocab.json").write_text("{broken")

    assert run("--hf-checkpoint", str(copy))[0] == 0


@pytest.mark.parametrize("name", ["model_index.json", "vae/diffusion_pytorch_model.safetensors"])
def test_pipe_is_called_one(refused, copy, name):
    (copy / name).unlink()
    os.mkfifo(copy / name)

    assert "is a pipe, and no regular file" in refused("--hf-checkpoint", str(copy), "--no-dry-run")


def test_folder_that_is_missing_in_one_that_is_there_is_no_name_of_the_hub(refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").mkdir()

    message = refused("--hf-checkpoint", "file/x")

    assert "file is there, and has no x" in message
    assert "hf download" not in message
