"""What a run tells of its diffusion student: rows of the dry run, distillation.json, the call on the console."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from miles_dmd.contracts.student import teacher_name
from miles_dmd.files import digests
from miles_dmd.modalities.diffusion.distillation import Distillation
from miles_dmd.modalities.diffusion.family import diffusion_family
from miles_dmd.modalities.diffusion.model_card import usage
from miles_dmd.modalities.diffusion.options import diffusion_options
from miles_dmd.modalities.diffusion.prompt_table import table_bytes
from miles_dmd.sampling.grid import sigma_grid
from miles_dmd.shown import byte_size, with_tilde

if TYPE_CHECKING:
    from miles_dmd.preflight.resolved import ResolvedRun


def rows(run: ResolvedRun) -> list[tuple[str, str]]:
    """Rows of the table of the rollout."""
    own, family = diffusion_options(run.args), diffusion_family(run.args)
    height, width = family.resolution(run.student)
    grid = ", ".join(f"{sigma:.4g}" for sigma in sigma_grid(own.num_inference_steps, own.shift))
    return [
        ("sampler", f"{own.solver}, stop steps {own.stop_step_policy}"),
        ("sigmas", f"{grid} (shift {own.shift:g})"),
        *_warned_of_shift(own.shift, family.scheduler_shift(run.student.pipeline_directory)),
        ("images", f"{height} x {width}, {family.text_length(run.args)} text tokens"),
        ("encoded", f"{byte_size(table_bytes(run))} of disk in --cache-dir {with_tilde(run.args.cache_dir)}"),
    ]


def _warned_of_shift(ours: float, pipelines: float) -> list[tuple[str, str]]:
    """The student may have a grid of its own, but more often the flag was forgotten."""
    if math.isclose(ours, pipelines):
        return []
    return [("warning", f"the pipeline's own scheduler has shift {pipelines:g}; pass --shift {pipelines:g} to keep it")]


def describe(run: ResolvedRun, policy_version: int) -> Distillation:
    """The arguments with which the stock pipeline samples student and teacher."""
    args, own, family = run.args, diffusion_options(run.args), diffusion_family(run.args)
    height, width = family.resolution(run.student)
    common = {"max_sequence_length": family.text_length(args), "height": height, "width": width}
    negative = {"negative_prompt": own.negative_prompt} if own.negative_prompt else {}
    steps = own.num_inference_steps
    # the pipeline shifts what it is given, once, so it is given the grid before the shift
    student = {"num_inference_steps": steps, "guidance_scale": 1.0, "sigmas": list(sigma_grid(steps, 1.0)), **common}
    return Distillation(
        sigmas=sigma_grid(steps, own.shift),
        solver=own.solver,
        teacher=teacher_name(args.teacher_directory),
        teacher_sha256=family.fingerprint(args.teacher_directory, digests(args.cache_dir)),
        policy_version=policy_version,
        student_call=student,
        teacher_call={**run.teacher_sampling, **common, **negative},
    )


def called(run: ResolvedRun, directory: Path, record: Distillation) -> str:
    """For the console: the call that samples from the student rightly."""
    return usage(diffusion_family(run.args).pipeline, directory, record)
