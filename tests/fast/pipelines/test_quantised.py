"""Weights of 8 bits and quantised components are refused at the door, by the component's name."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles_dmd.config.cli import parse_args
from miles_dmd.errors import ConfigError
from miles_dmd.preflight.rules import resolve

NETWORK = "transformer/diffusion_pytorch_model.safetensors"


@pytest.fixture
def line(flags, copy):
    """``line("--dry-run")``: the one line with which the door refuses ``copy``."""

    def parsed(*more, flag="--hf-checkpoint"):
        with pytest.raises(ConfigError) as error:
            resolve(parse_args(flags(flag, str(copy), *more)))
        assert "\n" not in str(error.value)
        return str(error.value)

    return parsed


@pytest.mark.parametrize(
    "file", [NETWORK, "vae/diffusion_pytorch_model.safetensors", "text_encoder_3/model.safetensors"]
)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8])
@pytest.mark.parametrize("more", [(), ("--dry-run",)], ids=["run", "dry run"])
def test_a_component_of_8_bits_is_named(copy, line, file, dtype, more):
    tensors = load_file(copy / file)
    last = sorted(tensors)[-1]
    save_file(tensors | {last: tensors[last].to(dtype)}, copy / file, {"format": "pt"})

    said = line(*more)

    assert said.startswith(
        f"--hf-checkpoint {copy}: {file.partition('/')[0]} is stored in 8 bits or fewer ('{last}' of"
    )
    assert "name a directory of the original weights" in said


@pytest.mark.parametrize("file", [NETWORK, "text_encoder_3/model.safetensors"])
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64, torch.bool])
def test_weights_of_whole_numbers_are_named(copy, line, file, dtype):
    tensors = load_file(copy / file)
    last = sorted(tensors)[-1]
    save_file(tensors | {last: tensors[last].to(dtype)}, copy / file, {"format": "pt"})

    assert f"{file.partition('/')[0]} is stored in whole numbers ('{last}' of" in line("--dry-run")


@pytest.mark.parametrize("component", ["transformer", "vae", "text_encoder", "text_encoder_3"])
@pytest.mark.parametrize("flag", ["--hf-checkpoint", "--teacher-checkpoint", "--actor-hf-checkpoint"])
@pytest.mark.parametrize("how", [{"quant_method": "bitsandbytes", "load_in_4bit": True}, {}, "torchao"])
def test_a_quantised_component_is_named(copy, line, component, flag, how):
    path = copy / component / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": how}))

    said = line(flag=flag)

    assert said.startswith(f"{flag} {copy}: {component} is quantised ({path} has a quantization_config")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_16_bits_and_more_pass(copy, flags, dtype):
    save_file({name: value.to(dtype) for name, value in load_file(copy / NETWORK).items()}, copy / NETWORK)

    resolve(parse_args(flags("--hf-checkpoint", str(copy))))


def test_a_shard_of_8_bits_is_found(copy, line):
    tensors = load_file(copy / NETWORK)
    (copy / NETWORK).unlink()
    names = sorted(tensors)
    shards = {"one.safetensors": names[:-1], "two.safetensors": names[-1:]}
    for shard, part in shards.items():
        narrow = torch.float8_e4m3fn if shard == "two.safetensors" else torch.float32
        save_file({name: tensors[name].to(narrow) for name in part}, copy / "transformer" / shard)
    index = {"weight_map": {name: shard for shard, part in shards.items() for name in part}}
    (copy / f"{NETWORK}.index.json").write_text(json.dumps(index))

    assert "two.safetensors is F8_E4M3" in line()
