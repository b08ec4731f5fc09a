"""SGLang's names for model families, and how it encodes prompts. Knows no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from miles_dmd.errors import ConfigError
from miles_dmd.pipelines.documents import read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A model family as SGLang serves it."""

    model_id: str
    """From which SGLang tells the family; a directory's name would decide otherwise."""
    pipeline: str
    """Class that ``/model_info`` must name."""
    text_encoders: tuple[str, ...]
    """Components, in the order in which flags that are about all of them name them."""
    text_length: Callable[[Path, int], int | None]
    """(checkpoint, text length of the run) -> what to send; None sends nothing. Raises ConfigError."""
    fixed_parameters: frozenset[str]
    """Parameters of the server's network that are tables here, which no training changes."""


def _sd3_text_length(checkpoint: Path, wanted: int) -> int | None:
    """SGLang applies one length to all three encoders, diffusers to T5 alone; its defaults are the real SD3's."""
    folders = ("tokenizer", "tokenizer_2")
    clip = {int(read_json(checkpoint / name / "tokenizer_config.json").get("model_max_length", 77)) for name in folders}
    if clip == {wanted}:
        return wanted
    if clip == {77} and wanted == 256:
        return None
    raise ConfigError(
        f"--max-sequence-length {wanted}: SGLang gives all text encoders of {checkpoint} one length, or 77 to CLIP and "
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
