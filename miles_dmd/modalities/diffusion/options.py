"""Options of diffusion models: the student's sampler, image size, text length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from miles_dmd.config.values import Count, NonNegative, Shift, Steps

if TYPE_CHECKING:
    from miles_dmd.config.args import Args


@dataclass(frozen=True, kw_only=True)
class DiffusionOptions:
    num_inference_steps: Steps = 4
    """Steps N of the student's sampler."""
    shift: Shift = 3.0
    """Timestep shift of the student's sigma grid: N=4 and shift 3 give 1, 0.9, 0.75, 0.5."""
    solver: Literal["renoise", "euler"] = "renoise"
    """Solver, from one step of the student to the next: renoise is DMD2's (SDE), euler the deterministic one (ODE)."""
    stop_step_policy: Literal["uniform", "stratified", "cycle"] = "stratified"
    """At which step a rollout stops: drawn per sample, spread evenly over the batch, or in turn."""
    height: Count | None = None
    """Image height in pixels; by default the pipeline's."""
    width: Count | None = None
    """Image width in pixels; by default the pipeline's."""
    negative_prompt: str = ""
    """Text of the teacher's unconditional branch."""
    max_sequence_length: Count | None = None
    """Text tokens of the long encoder (T5); by default what the pipeline itself uses."""
    alarm_saturation: NonNegative = 0.01
    """Alarm when this share of the samples' latents lies beyond the range of the teacher's; 0: never."""
    alarm_diversity: NonNegative = 0.3
    """Alarm when the distance between a prompt's seeds falls below this share of the teacher's; 0: never."""


def diffusion_options(args: Args) -> DiffusionOptions:
    """The diffusion options of a run of this modality."""
    found: DiffusionOptions = args.modality_options
    return found
