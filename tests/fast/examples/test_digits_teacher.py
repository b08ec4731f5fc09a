"""Does make_teacher leave a whole pipeline that stock diffusers opens, and refuse to overwrite anything else?"""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "digits"


def make_teacher(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE / "make_teacher.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_short_run_leaves_a_pipeline_that_samples(tmp_path):
    from diffusers import StableDiffusion3Pipeline

    out = tmp_path / "teacher"
    run = make_teacher("--out", str(out), "--autoencoder-steps", "2", "--transformer-steps", "2", "--samples", "0")

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


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--out", str(EXAMPLE)], "holds something that is not a pipeline"),
        (["--out", str(EXAMPLE / "digits.py")], "is a file"),
        (["--transformer-steps", "0"], "--transformer-steps 0: give a whole number from 1 up"),
    ],
)
def test_what_cannot_be_made_is_refused(arguments, complaint):
    run = make_teacher(*arguments)

    assert run.returncode == 2
    assert complaint in run.stderr
