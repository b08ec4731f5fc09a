"""Exports hold what was trained: from teachers stored in bf16, fp16 and fp32, at the end and as the best one."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from miles_dmd.modalities.diffusion.distillation import read_distillation
from miles_dmd.run import DistillationTrainer, main

WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
TABLE = "pos_embed.pos_embed"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(scope="module")
def stored(teacher, tmp_path_factory):
    """``stored("bf16")``: the digits teacher, its transformer in that dtype."""

    def make(dtype):
        directory = tmp_path_factory.mktemp(dtype) / "teacher"
        shutil.copytree(teacher, directory)
        tensors = {name: value.to(DTYPES[dtype]) for name, value in load_file(directory / WEIGHTS).items()}
        save_file(tensors, directory / WEIGHTS, {"format": "pt"})
        return directory

    return make


def average_of(trainer):
    return {
        name: value
        for part in trainer.executor._groups["actor"].trainer.weights("student", averaged=True)
        for name, value in part.items()
    }


def parameters(directory):
    return {name: value for name, value in load_file(directory / WEIGHTS).items() if name != TABLE}


def long_vector(tensors):
    return np.concatenate([tensors[name].double().numpy().ravel() for name in sorted(tensors)])


def relative_error(written, average, start):
    """Relative error of the learned change."""
    one, two, three = map(long_vector, (written, average, start))
    return np.linalg.norm(one - two) / np.linalg.norm(two - three)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("asked", ["auto", "stored"])
def test_the_share_is_told_and_auto_loses_nothing(make_args, stored, tmp_path, capsys, dtype, asked):
    checkpoint = stored(dtype)
    args = make_args(
        "--local", "--hf-checkpoint", str(checkpoint), "--export-dtype", asked, "--save", str(tmp_path),
        "--keep-best", "min:actor/loss", "--sample-interval", "1", "--sample-prompts", "1",
    )  # fmt: skip
    trainer = DistillationTrainer(args)

    trainer.fit()

    average = average_of(trainer)
    error = relative_error(parameters(tmp_path / "student"), average, parameters(checkpoint))
    report = read_distillation(tmp_path / "student").weights
    assert report.change_kept == pytest.approx(max(0.0, 1 - error), abs=1e-6)
    assert report.stored_dtype == dtype
    exact = asked == "auto" or dtype == "fp32"
    assert (report.dtype, report.change_kept == 1) == ("fp32" if exact else dtype, exact)
    assert {value.dtype for value in parameters(tmp_path / "student").values()} == {DTYPES[report.dtype]}
    assert (tmp_path / "samples" / "exported.png").is_file() == (not exact)
    assert f"weights: {report}" in capsys.readouterr().out
    best = read_distillation(tmp_path / "student_best").weights
    assert (best.dtype, best.change_kept == 1) == (report.dtype, exact)
    for directory in ("student", "student_best"):
        said = (tmp_path / directory / "distillation.json").read_text() + (
            tmp_path / directory / "README.md"
        ).read_text()
        assert str(tmp_path) not in said
        assert str(checkpoint.parent) not in said


def test_the_last_grid_is_drawn_from_the_files(make_args, stored, tmp_path):
    """The exported student draws what the teacher's weights drew where bf16 keeps nothing of the change."""
    args = make_args(
        "--local", "--hf-checkpoint", str(stored("bf16")), "--export-dtype", "stored", "--save", str(tmp_path),
        "--lr", "1e-9", "--sample-prompts", "2",
    )  # fmt: skip
    trainer = DistillationTrainer(args)

    trainer.fit()

    engine = trainer.executor._rollouts.engine.model.network
    written = parameters(tmp_path / "student")
    for name, value in engine.named_parameters():
        assert torch.equal(value, written[name].float()), name
    assert read_distillation(tmp_path / "student").weights.change_kept == 0
    first, last = (np.asarray(Image.open(tmp_path / "samples" / name)) for name in ("step_000000.png", "exported.png"))
    below_title = 60
    assert first.shape == last.shape
    assert np.abs(first[below_title:].astype(int) - last[below_title:]).max() <= 1


def test_a_run_that_goes_on_in_another_dtype_leaves_no_grid_of_the_first(flags, stored, tmp_path):
    words = ("--local", "--hf-checkpoint", str(stored("bf16")), "--save", str(tmp_path), "--sample-prompts", "1")
    assert main(flags(*words, "--export-dtype", "bf16")) == 0
    assert (tmp_path / "samples" / "exported.png").is_file()

    assert main(flags(*words, "--load", "latest", "--export-dtype", "fp32")) == 0

    assert not (tmp_path / "samples" / "exported.png").exists()
    assert read_distillation(tmp_path / "student").weights.change_kept == 1


def test_through_ray_the_report_comes_back_and_the_grid_is_drawn(make_args, stored, ray_cluster, tmp_path, capsys):
    args = make_args(
        "--hf-checkpoint", str(stored("bf16")), "--export-dtype", "stored",
        "--num-rollout", "1", "--sample-prompts", "1", "--save", str(tmp_path),
    )  # fmt: skip

    DistillationTrainer(args).fit()

    report = read_distillation(tmp_path / "student").weights
    assert 0 < report.change_kept < 0.99
    assert f"weights: {report}" in capsys.readouterr().out
    assert (tmp_path / "samples" / "exported.png").is_file()


def test_a_teacher_of_8_bits_is_refused_and_nothing_is_written(flags, teacher, tmp_path, capsys):
    """It trained, and exported the teacher bit for bit."""
    copy = tmp_path / "teacher"
    shutil.copytree(teacher, copy)
    narrow = {name: value.to(torch.float8_e4m3fn) for name, value in load_file(copy / WEIGHTS).items()}
    save_file(narrow, copy / WEIGHTS, {"format": "pt"})

    status = main(flags("--local", "--hf-checkpoint", str(copy), "--save", str(tmp_path / "run")))

    (said,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert status == 2
    assert "transformer is stored in 8 bits or fewer" in said
    assert not (tmp_path / "run").exists()


def test_a_disk_that_fills_up_at_the_export_is_one_line(flags, tmp_path, capsys, monkeypatch):
    """The limit on the size of files comes once training is done, as a disk may fill up at any time."""
    import resource

    from miles_dmd import run

    export = run.export_student

    def limited(*parts):
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY))
        try:
            return export(*parts)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    monkeypatch.setattr(run, "export_student", limited)

    status = main(flags("--local", "--save", str(tmp_path)))

    said = capsys.readouterr().err.splitlines()[-1]
    assert status == 1
    assert f"SaveError: the student could not be written to {tmp_path / 'student'}: File too large" in said
    assert f"go on with --load {tmp_path / 'checkpoints'}" in said
    assert [path.name for path in tmp_path.glob("student*")] == []
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["format"] == 1
