"""Rules about the options of diffusion models, and what they need of the pipeline directories."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from miles_dmd.config.values import Count, Guidance, checked, kind_of
from miles_dmd.errors import ConfigError
from miles_dmd.modalities.diffusion.family import diffusion_family
from miles_dmd.modalities.diffusion.options import diffusion_options
from miles_dmd.modalities.diffusion.prompt_table import check_room
from miles_dmd.prompts import messages_of
from miles_dmd.shown import short_repr

if TYPE_CHECKING:
    from miles_dmd.preflight.resolved import ResolvedRun

SAMPLING = {"num_inference_steps": kind_of(Count), "guidance_scale": kind_of(Guidance)}


def check_teacher_sampling(run: ResolvedRun) -> None:
    """Raises ConfigError where the teacher could not be sampled as the loss type says."""
    asked, found = f"--loss-type {run.args.loss_type}", run.teacher_sampling
    if not isinstance(found, Mapping) or (found and found.keys() != SAMPLING.keys()):
        raise ConfigError(
            f"{asked}: teacher_sampling gives {short_repr(found)}; it must give {' and '.join(SAMPLING)}, or {{}}"
        )
    for name, value in found.items():
        where = f"{asked}: teacher_sampling's {name}"
        if isinstance(value, str):
            raise ConfigError(f"{where} {short_repr(value)} must be {SAMPLING[name]}")
        checked(SAMPLING[name], value, where)


def check_pixels(run: ResolvedRun) -> None:
    family = diffusion_family(run.args)
    for flag, pixels in zip(("--height", "--width"), family.resolution(run.student), strict=True):
        for directory in run.directories:
            step, longest = family.pixel_multiple(directory), family.max_pixels(directory)
            if pixels % step:
                nearest = max(round(pixels / step), 1) * step
                raise ConfigError(
                    f"{flag} {pixels} must be a multiple of {step} for {directory}; the nearest is {nearest}"
                )
            if pixels > longest:
                raise ConfigError(f"{flag} {pixels} is more than {directory} has positions for; at most {longest}")


def check_text_length(run: ResolvedRun) -> None:
    asked, longest = diffusion_options(run.args).max_sequence_length, diffusion_family(run.args).longest_text
    if asked is not None and asked > longest:
        raise ConfigError(f"--max-sequence-length {asked} is more than the stock pipeline takes; at most {longest}")


def check_texts(run: ResolvedRun) -> None:
    if any(messages_of(text) for text in run.prompts):
        raise ConfigError(
            f"--prompt-data {run.args.prompt_data}: holds messages, and images are drawn from texts; write "
            '{"prompt": "..."} lines'
        )


def check_saturation(run: ResolvedRun) -> None:
    share = diffusion_options(run.args).alarm_saturation
    if share >= 1:
        raise ConfigError(
            f"--alarm-saturation {share:g} is a share of latents, and none is above 1, so it would "
            "never ring; name less than 1, or 0 to switch it off"
        )


RULES = (check_teacher_sampling, check_texts, check_saturation, check_pixels, check_text_length, check_room)
"""In order: what comes first makes sense of what comes after."""
