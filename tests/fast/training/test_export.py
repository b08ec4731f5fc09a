"""A student holds what was trained, in shards too; its files are our own; a full disk leaves no half of one."""

import json
import os
import resource
import shutil
import stat
from contextlib import contextmanager

import pytest
import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save_file

from miles_dmd import registry
from miles_dmd.errors import SaveError
from miles_dmd.modalities.diffusion.distillation import Distillation, read_distillation
from miles_dmd.network.pretrained import load_network
from miles_dmd.training import export

FAMILY = registry.load("models", "sd3")
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SAID = Distillation(
    sigmas=(1.0, 0.9, 0.75, 0.5), solver="renoise", teacher="digits", policy_version=3,
    student_call={"num_inference_steps": 4}, teacher_call={"num_inference_steps": 28},
)  # fmt: skip


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


@pytest.mark.parametrize(("change", "dtype"), [(0.0, "bf16"), (1e-6, "fp32"), (1.0, "bf16")])
def test_sharded_half_precision_weights_survive_loading_and_writing(
    sharded_source, tmp_path, monkeypatch, change, dtype
):
    monkeypatch.setattr(export, "SHARD_SIZE", 20_000)
    monkeypatch.setattr("miles_dmd.training.export.BUCKET_BYTES", 10_000)
    network = load_network(FAMILY, sharded_source)
    parameters = {name: value.detach() + change for name, value in network.named_parameters()}
    half = len(parameters) // 2
    buckets = [dict(list(parameters.items())[:half]), dict(list(parameters.items())[half:])]

    report = export._write_network(tmp_path / "written", sharded_source / "transformer", buckets, "auto")

    assert report.dtype == dtype
    index = json.loads((tmp_path / "written" / "diffusion_pytorch_model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    written = SD3Transformer2DModel.from_pretrained(tmp_path / "written").state_dict()
    source = SD3Transformer2DModel.from_pretrained(sharded_source / "transformer").state_dict()
    assert written.keys() == source.keys()
    for name, value in source.items():
        expected = parameters[name].to(DTYPES[dtype]).float() if name in parameters else value
        assert torch.equal(written[name], expected), name
    read = list(export.exported_buckets(tmp_path / "written", FAMILY.saved_buffers))
    assert len(read) > 1
    assert {name for bucket in read for name in bucket} == parameters.keys()
    for bucket in read:
        for name, value in bucket.items():
            assert torch.equal(value, written[name].float()), name


@pytest.fixture
def write(teacher):
    """``write(directory, checkpoint)``: a student a hundredth away from its checkpoint."""

    def written(directory, checkpoint=teacher, dtype="auto", said=SAID):
        stored = load_file(checkpoint / WEIGHTS)
        average = {name: value.float() * 1.01 for name, value in stored.items() if name != "pos_embed.pos_embed"}
        return export.write_student(
            directory, [average], family=FAMILY, start=checkpoint, shift=3.0, distillation=said, dtype=dtype
        )

    return written


def test_the_share_stands_in_all_places(write, teacher, tmp_path):
    report = write(tmp_path / "student", dtype="bf16")

    assert 0 < report.change_kept < 0.99
    assert read_distillation(tmp_path / "student").weights == report
    assert str(report) in (tmp_path / "student" / "README.md").read_text()
    stored = load_file(tmp_path / "student" / WEIGHTS)
    assert {value.dtype for name, value in stored.items() if name != "pos_embed.pos_embed"} == {torch.bfloat16}


@contextmanager
def umask(mask):
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize(("mask", "file", "folder"), [(0o077, 0o600, 0o700), (0o022, 0o644, 0o755)])
@pytest.mark.parametrize("theirs", [0o444, 0o777])
def test_files_have_our_modes_whatever_the_teachers_are(write, teacher, tmp_path, mask, file, folder, theirs):
    shared = tmp_path / "teacher"
    shutil.copytree(teacher, shared)
    (shared / "LICENSE.md").write_text("free")
    for path in sorted(shared.rglob("*"), reverse=True):
        path.chmod(theirs | 0o111 if path.is_dir() else theirs)

    with umask(mask):
        write(tmp_path / "student", shared)

    found = [(path, stat.S_IMODE(path.stat().st_mode)) for path in (tmp_path / "student").rglob("*")]
    assert {mode for path, mode in found if path.is_file()} == {file}
    assert {mode for path, mode in found if path.is_dir()} == {folder}
    assert (tmp_path / "student" / "LICENSE.md").read_text() == "free"


def test_links_are_followed_as_the_hubs_cache_has_them(write, teacher, tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    shutil.copytree(teacher, blobs)
    for path in blobs.rglob("*"):
        if path.is_file():
            link = snapshot / path.relative_to(blobs)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)

    write(tmp_path / "student", snapshot)

    assert not any(path.is_symlink() for path in (tmp_path / "student").rglob("*"))
    StableDiffusion3Pipeline.from_pretrained(tmp_path / "student")


@pytest.mark.parametrize("largest", [100, 30_000, 700_000])
def test_a_full_disk_is_one_line_and_leaves_nothing(write, tmp_path, largest):
    """No file may grow beyond a limit: what fails is a configuration, an encoder's file, the network's weights."""
    (tmp_path / "student").mkdir()
    (tmp_path / "student" / "old").touch()
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, resource.RLIM_INFINITY))
    try:
        with pytest.raises(SaveError) as error:
            write(tmp_path / "student")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    assert str(error.value).startswith(f"the student could not be written to {tmp_path / 'student'}: ")
    assert "File too large" in str(error.value)
    assert not any(word in str(error.value) for word in ("[", "\n"))
    assert [path.name for path in tmp_path.iterdir()] == ["student"]
    assert [path.name for path in (tmp_path / "student").iterdir()] == ["old"]


def test_what_a_killed_export_left_is_replaced(write, tmp_path):
    partial = tmp_path / "student.partial"
    (partial / "vae").mkdir(parents=True)
    (partial / "vae" / "half").touch()

    write(tmp_path / "student")

    assert [path.name for path in tmp_path.iterdir()] == ["student"]
    assert not (tmp_path / "student" / "vae" / "half").exists()


def test_8_bits_are_not_written_where_nobody_stood_at_the_door(write, teacher, tmp_path):
    copy = tmp_path / "teacher"
    shutil.copytree(teacher, copy)
    narrow = {name: value.to(torch.float8_e4m3fn) for name, value in load_file(teacher / WEIGHTS).items()}
    save_file(narrow, copy / WEIGHTS, {"format": "pt"})

    report = write(tmp_path / "student", copy, dtype="stored")

    assert (report.dtype, report.stored_dtype) == ("fp32", "float8_e4m3fn")
