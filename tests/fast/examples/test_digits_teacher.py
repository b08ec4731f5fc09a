"""make_teacher: a whole pipeline that stock diffusers opens, and nothing else overwritten."""

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "digits"
SHORT = ("--autoencoder-steps", "2", "--transformer-steps", "2", "--samples", "0")


def make_teacher(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE / "make_teacher.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_short_run_leaves_a_pipeline_that_samples(tmp_path):
    from diffusers import StableDiffusion3Pipeline

    out = tmp_path / "teacher"
    run = make_teacher("--out", str(out), *SHORT)

    assert run.returncode == 0, run.stderr
    pipeline = StableDiffusion3Pipeline.from_pretrained(out)
    call = {"num_inference_steps": 2, "max_sequence_length": 12, "height": 64, "width": 64, "output_type": "pt"}
    assert pipeline("a handwritten two", **call).images.shape == (1, 3, 64, 64)
    assert [file.name for file in tmp_path.iterdir()] == ["teacher"]
    assert not [file for file in out.rglob("*.json") if str(tmp_path) in file.read_text()]


def test_prompts_differ_in_every_embedding():
    import torch
    from diffusers import StableDiffusion3Pipeline

    pipeline = StableDiffusion3Pipeline.from_pretrained(EXAMPLE / "teacher")
    prompts = [*(EXAMPLE / "prompts.txt").read_text().splitlines(), ""]
    hidden, _, pooled, _ = pipeline.encode_prompt(
        prompts, prompts, prompts, max_sequence_length=12, do_classifier_free_guidance=False
    )

    assert hidden.shape[:2] == (11, 24)
    assert torch.pdist(hidden.flatten(1)).min() > 1
    assert torch.pdist(pooled).min() > 0.3


def test_a_directory_that_holds_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("the only copy")

    run = make_teacher("--out", str(tmp_path), *SHORT)

    assert run.returncode == 2
    assert f"--out {tmp_path} holds something that is not a pipeline" in run.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_file_is_no_directory(tmp_path):
    file = tmp_path / "thesis.txt"
    file.write_text("the only copy")

    run = make_teacher("--out", str(file), *SHORT)

    assert run.returncode == 2
    assert f"--out {file} is a file" in run.stderr


def test_no_steps_are_refused(tmp_path):
    run = make_teacher("--out", str(tmp_path / "teacher"), "--transformer-steps", "0")

    assert run.returncode == 2
    assert "--transformer-steps 0: give a whole number from 1 up" in run.stderr
