"""The teacher's samples are those of the stock pipeline, and are drawn once."""

import json
import shutil

import pytest
import torch

from miles_dmd import registry
from miles_dmd.modalities.diffusion import teacher
from miles_dmd.modalities.diffusion.conditions import PromptTable
from miles_dmd.modalities.diffusion.encoding import ensure_table
from miles_dmd.modalities.diffusion.requests import DenoisingRequest
from miles_dmd.prompts import read_prompts
from miles_dmd.training.compute import choose_compute

SAMPLING = {"num_inference_steps": 6, "guidance_scale": 2.5}
REQUESTS = [DenoisingRequest(sample_id=n, prompt_id=n % 10, seed=50 + n, stop_step=3) for n in range(3)]


@pytest.fixture
def draw(make_args, digit_prompts, tmp_path):
    def draw(requests=REQUESTS, sampling=SAMPLING, *more):
        args = make_args("--cache-dir", str(tmp_path / "cache"), "--rollout-micro-batch-size", "4", *more)
        compute = choose_compute("cpu", "fp32")
        prompts = PromptTable(ensure_table(args, read_prompts(digit_prompts), compute.device))
        family = registry.load("models", args.model_family)
        shape = family.code().latent_shape(teacher.Path(args.teacher_path), *family.resolution(args))
        return teacher.teacher_samples(args, requests, sampling, shape=shape, compute=compute, prompts=prompts)

    return draw


@pytest.fixture(scope="module")
def pipeline_of():
    from diffusers import StableDiffusion3Pipeline

    def open_pipeline(directory):
        pipeline = StableDiffusion3Pipeline.from_pretrained(directory)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    return open_pipeline


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_samples_equal_the_stock_pipelines(draw, make_args, digit_prompts, pipeline_of, scale):
    args = make_args()
    texts = read_prompts(digit_prompts)
    pipeline = pipeline_of(args.teacher_path)

    ours = draw(sampling={**SAMPLING, "guidance_scale": scale})

    for sample, request in zip(ours, REQUESTS, strict=True):
        start = torch.randn(sample.shape, generator=torch.Generator().manual_seed(request.seed))[None]
        theirs = pipeline(
            texts[request.prompt_id], latents=start, num_inference_steps=6, guidance_scale=scale,
            max_sequence_length=12, height=64, width=64, output_type="latent",
        )  # fmt: skip
        torch.testing.assert_close(sample, theirs.images[0], rtol=1e-4, atol=1e-4)


def test_a_scheduler_that_shifts_by_size_is_followed(make_args, pipeline_of, tmp_path):
    directory = tmp_path / "teacher"
    shutil.copytree(make_args().teacher_path, directory)
    path = directory / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "use_dynamic_shifting": True, "shift": 1.0}))
    pipeline = pipeline_of(directory)
    code = registry.load("models", "sd3").code()

    ours = code.sampling_sigmas(directory, 5, code.latent_shape(directory, 64, 64))

    pipeline("a handwritten one", num_inference_steps=5, height=64, width=64, max_sequence_length=12)
    assert ours == pytest.approx(pipeline.scheduler.sigmas.tolist())


def test_they_are_drawn_once_for_what_they_depend_on(draw, monkeypatch, tmp_path):
    drawn = []
    real = teacher.load_network
    monkeypatch.setattr(teacher, "load_network", lambda *a, **k: drawn.append(1) or real(*a, **k))

    first = draw()
    assert torch.equal(draw(), first)
    assert len(drawn) == 1

    (kept,) = (tmp_path / "cache" / "teacher").iterdir()
    kept.write_bytes(kept.read_bytes()[:-5])
    assert torch.equal(draw(), first), "a damaged one is drawn again"
    drawn.pop()

    assert not torch.equal(draw(sampling={**SAMPLING, "guidance_scale": 4.0}), first)
    assert not torch.equal(draw(sampling={**SAMPLING, "num_inference_steps": 5}), first)
    assert len(draw(REQUESTS[:2])) == 2
    assert len(drawn) == 4
