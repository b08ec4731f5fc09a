"""A student's card is what the hub reads, runs as it stands, and tells nothing of the machine that wrote it."""

import re
from dataclasses import replace

import pytest
import yaml

from miles_dmd.contracts.reports import ExportReport
from miles_dmd.contracts.student import teacher_name
from miles_dmd.modalities.diffusion.distillation import Distillation
from miles_dmd.modalities.diffusion.model_card import model_card, usage

REPORT = ExportReport(dtype="fp32", change_kept=1.0, stored_dtype="bf16", stored_change_kept=0.20305)
STUDENT = Distillation(
    sigmas=(1.0, 0.9, 0.75, 0.5), solver="renoise", teacher="stabilityai/stable-diffusion-3.5-medium",
    policy_version=1200, weights=REPORT, teacher_call={"num_inference_steps": 28},
    student_call={"num_inference_steps": 4, "guidance_scale": 1.0, "sigmas": [1.0, 0.75, 0.5, 0.25], "height": 64},
)  # fmt: skip
PIPELINE = "StableDiffusion3Pipeline"


def front_matter(card):
    return yaml.safe_load(re.match(r"---\n(.*?)^---$", card, re.M | re.S)[1])


def test_the_hub_finds_library_task_and_teacher():
    assert front_matter(model_card(PIPELINE, STUDENT)) == {
        "library_name": "diffusers",
        "pipeline_tag": "text-to-image",
        "tags": ["distillation", "few-step"],
        "base_model": "stabilityai/stable-diffusion-3.5-medium",
    }


@pytest.mark.parametrize("name", ["my_model", "a: b", "`x`", "- y\\n"])
def test_a_teacher_that_is_not_on_the_hub_is_no_base_model(name):
    card = model_card(PIPELINE, replace(STUDENT, teacher=name))

    assert "base_model" not in front_matter(card)
    assert f"student of `{name.replace('`', '')}`" in card


@pytest.mark.parametrize("solver", ["renoise", "euler"])
def test_its_snippet_calls_with_all_arguments(solver):
    card = model_card(PIPELINE, replace(STUDENT, solver=solver))
    (snippet,) = re.findall(r"^```python\n(.*?)^```$", card, re.M | re.S)
    lines = [line for line in snippet.splitlines() if not line.startswith(("import", "from"))]
    called, seeds = {}, []

    class Pipeline:
        @classmethod
        def from_pretrained(cls, place):
            return cls()

        def __call__(self, prompt, **call):
            called.update(call)
            return type("Out", (), {"images": ["image"]})

    exec("\n".join(lines), {PIPELINE: Pipeline, "torch": type("T", (), {"manual_seed": seeds.append})})

    assert called == STUDENT.student_call
    assert seeds == ([0] if solver == "renoise" else [])
    assert ("import torch" in snippet) == (solver == "renoise")
    assert "generator" not in snippet


def test_the_share_is_told_rounded_down():
    said = "fp32, which keeps 100 % of what was learned; bf16, as its pipeline is stored, would keep 20.3 %"

    assert f"| weights | {said} |" in model_card(PIPELINE, STUDENT)
    assert f"weights: {said}\n" in usage(PIPELINE, "runs/digits-1/student", STUDENT)
    assert str(replace(REPORT, dtype="bf16", change_kept=0.99999)) == "bf16, which keeps 99.9 % of what was learned"


def test_the_console_shows_the_call():
    assert "pipeline(prompt, num_inference_steps=4, guidance_scale=1.0, sigmas=[1.0, 0.75, 0.5, 0.25], height=64)" in (
        usage(PIPELINE, "runs/digits-1/student", STUDENT)
    )


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/home/somebody/my_model", "my_model"),
        ("my_model/", "my_model"),
        ("a/../my_model", "my_model"),
        ("/x/hub/models--stabilityai--stable-diffusion-3.5-medium/snapshots/0a1b", STUDENT.teacher),
        ("/x/hub/models--gpt2/snapshots/0a1b", "gpt2"),
        ("/x/half\udc80pair", "half\\udc80pair"),
    ],
)
def test_a_teacher_is_called_by_its_name_and_not_by_its_place(path, name):
    assert teacher_name(path) == name
