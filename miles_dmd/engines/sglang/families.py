"""Model families as SGLang serves them: names, text lengths, and the scheduler of the sigma grid. Knows no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from miles_dmd.errors import ConfigError, EngineMisanswer
from miles_dmd.files import atomic_write_text
from miles_dmd.modalities.diffusion.options import diffusion_options
from miles_dmd.pipelines.documents import read_json

if TYPE_CHECKING:
    from miles_dmd.config.args import Args

TOLERANCE = 1e-5
"""Between sigmas computed in fp32 there and in fp64 here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A model family as SGLang serves it."""

    model_id: str
    """Name from which SGLang tells the family; a directory's name would decide otherwise."""
    pipeline: str
    """Class that ``/model_info`` must name."""
    text_encoders: tuple[str, ...]
    """Components, in the order of flags that are about all of them."""
    text_length: Callable[[Path, int], int | None]
    """(pipeline directory, text length of the run) -> what to send; None sends nothing. Raises ConfigError."""
    fixed_parameters: frozenset[str]
    """Parameters of the server's network that are tables here, which no training changes."""

    def encoder_precisions(self, dtype: str) -> list[str]:
        """Value of --text-encoder-precisions."""
        return [dtype] * len(self.text_encoders)


def _sd3_text_length(directory: Path, wanted: int) -> int | None:
    """SGLang applies one length to all three encoders, diffusers to T5 alone; its defaults are the real SD3's."""
    folders = ("tokenizer", "tokenizer_2")
    clip = {int(read_json(directory / name / "tokenizer_config.json").get("model_max_length", 77)) for name in folders}
    if clip == {wanted}:
        return wanted
    if clip == {77} and wanted == 256:
        return None
    raise ConfigError(
        f"--max-sequence-length {wanted}: SGLang gives all text encoders of {directory} one length, or 77 to CLIP and "
        f"256 to T5; pass {min(clip)}{' or 256' if clip == {77} else ''}, or --rollout-engine inprocess"
    )


FAMILIES = {
    "sd3": Served(
        model_id="stable-diffusion-3.5-medium",
        pipeline="StableDiffusion3Pipeline",
        text_encoders=("text_encoder", "text_encoder_2", "text_encoder_3"),
        text_length=_sd3_text_length,
        fixed_parameters=frozenset({"pos_embed.pos_embed"}),
    )
}


def served(model_family: str) -> Served:
    """Raises ConfigError for a family that was not tried with SGLang."""
    if model_family not in FAMILIES:
        raise ConfigError(
            f"--rollout-engine sglang samples from {', '.join(FAMILIES)}, not from --model-family {model_family}; pass "
            "--rollout-engine inprocess"
        )
    return FAMILIES[model_family]


def scheduler_directory(args: Args) -> Path:
    """Scheduler of the run's grid, written below --cache-dir, because no request can name sigmas.

    Its last part must be called so: SGLang reads the configuration's name off it.
    """
    directory = Path(args.cache_dir) / "sglang" / f"shift_{diffusion_options(args).shift:g}" / "scheduler"
    content = {
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "num_train_timesteps": 1000,
        "shift": diffusion_options(args).shift,
        # linspace(1, 0, N+1) without its end, then shifted once; without it the last of 4 sigmas would be 0.009
        "use_uniform_sigmas": True,
    }
    atomic_write_text(directory / "scheduler_config.json", json.dumps(content, indent=2) + "\n")
    return directory


def check_grid(found: Sequence[float], expected: Sequence[float], server: str, cure: str) -> None:
    """``found`` ends with the 0 at which the last step arrives. Raises EngineMisanswer."""
    wanted = (*expected, 0.0)
    if len(found) == len(wanted) and all(abs(a - b) <= TOLERANCE for a, b in zip(found, wanted, strict=True)):
        return
    shown = ", ".join(f"{sigma:.4g}" for sigma in found)
    raise EngineMisanswer(
        f"{server} samples at sigmas {shown}; the run wants {', '.join(f'{sigma:.4g}' for sigma in wanted)}: {cure}"
    )
