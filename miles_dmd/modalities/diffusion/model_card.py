"""README.md of an exported student: how to call it, what it was distilled from, in which dtype. Knows no torch."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from miles_dmd.modalities.diffusion.distillation import FILE_NAME, Distillation

CARD_NAME = "README.md"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
TEMPLATE = """\
---
{front}---
# A {steps}-step student of {teacher}

Distilled with miles_dmd. Guidance is inside it: it samples at `guidance_scale=1`, and takes no negative prompt.

## How to call it

```python
{imports}
pipeline = {pipeline}.from_pretrained("path/to/this/directory")

{call}
```

It takes all of these arguments. Without `sigmas` diffusers samples at other noise levels than the student was trained
for, and says nothing. `{document}` holds the same call as JSON, and the teacher's.{noise}

## What it is

| | |
|---|---|
| distilled from | {teacher} |
| updates of the student | {updates:,} |
| noise levels | {sigmas} |
| weights | {weights} |

What a dtype keeps is 1 - |rounded - average| / |average - start|: the average of the weights in training is fp32,
start is what they were before it, and the norms are over all parameters together. `from_pretrained` with a
`torch_dtype` rounds once more.

## Licence

A distilled model usually keeps the licence of its teacher. Licence files that came with the checkpoint lie beside this
file.
"""
NOISE = """

Its scheduler draws fresh noise in every step from torch's global generator, so `torch.manual_seed` alone decides the
image. A `generator` of the same seed besides it would give the first step the initial noise once more."""


def model_card(pipeline: str, distillation: Distillation) -> str:
    """In Markdown, with the front matter that the hub reads. ``pipeline`` is the class that opens the directory."""
    renoises = distillation.solver == "renoise"
    imports = [f"from diffusers import {pipeline}", ""]
    seed = ["torch.manual_seed(0)"] if renoises else []
    return TEMPLATE.format(
        front=_front_matter(distillation),
        steps=len(distillation.sigmas),
        teacher=f"`{distillation.teacher.replace('`', '')}`",
        imports="\n".join(["import torch", *imports] if renoises else imports),
        pipeline=pipeline,
        call="\n".join([*seed, f"image = {_call(distillation)}.images[0]"]),
        document=FILE_NAME,
        noise=NOISE if renoises else "",
        updates=distillation.policy_version,
        sigmas=", ".join(f"{sigma:.4g}" for sigma in distillation.sigmas),
        weights=distillation.weights or "unknown",
    )


def _call(distillation: Distillation) -> str:
    """``pipeline("a prompt", num_inference_steps=4, ...)``, an argument a line."""
    arguments = ['"a prompt"', *(f"{name}={value!r}" for name, value in distillation.student_call.items())]
    return "\n".join(["pipeline(", *(f"    {argument}," for argument in arguments), ")"])


def usage(pipeline: str, directory: Path, distillation: Distillation) -> str:
    """For the console: what the directory holds, and the call that samples from it rightly."""
    arguments = ", ".join(f"{name}={value!r}" for name, value in distillation.student_call.items())
    return "\n".join(
        [
            f"  weights: {distillation.weights or 'unknown'}",
            f"  pipeline = {pipeline}.from_pretrained({str(directory)!r})",
            f"  image = pipeline(prompt, {arguments}).images[0]",
        ]
    )


def _front_matter(distillation: Distillation) -> str:
    about = {"library_name": "diffusers", "pipeline_tag": "text-to-image", "tags": ["distillation", "few-step"]}
    base = {"base_model": distillation.teacher} if HUB_ID.fullmatch(distillation.teacher) else {}
    return yaml.safe_dump({**about, **base}, sort_keys=False)
