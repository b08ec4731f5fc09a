"""A batch that waits for its phase comes back from its file as it was."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles_dmd.contracts.batch_file import read_batch, write_batch
from miles_dmd.errors import CheckpointError
from miles_dmd.modalities.diffusion.batch import DenoisingBatch


@pytest.fixture
def batch():
    return DenoisingBatch(
        ids=(5, 6),
        prompt_ids=(1, 0),
        stop_steps=(3, 2),
        latents=torch.randn(2, 4, 3, 3),
        sigma=torch.tensor([0.5, 0.75]),
        clean=torch.randn(2, 4, 3, 3),
        policy_version=3,
        run_seed=11,
    )


def test_batch_comes_back_bit_equal(batch, tmp_path):
    write_batch(tmp_path / "batch.safetensors", batch)

    read = read_batch(tmp_path / "batch.safetensors")

    for name in ("ids", "prompt_ids", "stop_steps", "policy_version", "run_seed"):
        assert getattr(read, name) == getattr(batch, name)
    for name in ("latents", "sigma", "clean"):
        assert torch.equal(getattr(read, name), getattr(batch, name))


def test_rows_of_a_larger_batch_are_written_alone(batch, tmp_path):
    write_batch(tmp_path / "part.safetensors", batch.take([1]))

    assert read_batch(tmp_path / "part.safetensors").ids == (6,)
    assert (tmp_path / "part.safetensors").stat().st_size < 1024


@pytest.mark.parametrize("content", [b"", b"no tensors", bytes(64)])
def test_other_file_is_no_batch(tmp_path, content):
    (tmp_path / "batch.safetensors").write_bytes(content)

    with pytest.raises(CheckpointError, match="is no batch"):
        read_batch(tmp_path / "batch.safetensors")


@pytest.mark.parametrize("header", ["[]", "{}", '{"format": 1}', '{"format": 1, "ids": 3}', "x"])
def test_header_that_says_something_else_is_refused_by_name(batch, tmp_path, header):
    write_batch(tmp_path / "batch.safetensors", batch)
    tensors = load_file(tmp_path / "batch.safetensors")
    save_file(tensors, tmp_path / "batch.safetensors", {"batch": header})

    with pytest.raises(CheckpointError, match=r"batch\.safetensors is (no|a) batch"):
        read_batch(tmp_path / "batch.safetensors")


def test_missing_file_is_told(tmp_path):
    with pytest.raises(CheckpointError, match="is no batch"):
        read_batch(tmp_path / "batch.safetensors")
