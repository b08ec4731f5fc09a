"""Do a pipeline directory's files belong together, and a run's networks to each other? Seen without torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from miles_dmd.config.alike import require_same_content
from miles_dmd.config.checkpoints import (
    read_json,
    require_pipeline,
    require_tensors,
    require_tokenizer,
    require_weights,
    safetensors_parameters,
)
from miles_dmd.config.stored import refuse_quantised
from miles_dmd.errors import ConfigError
from miles_dmd.inputs import is_file

if TYPE_CHECKING:
    from miles_dmd.contracts.family import ModelFamily

STUDENTS = "distillation.json"
"""What a run leaves in the student that it exports."""


def check_pipeline(directory: Path, family: ModelFamily, *, weights: bool) -> None:
    """Raises ConfigError unless ``directory`` is a whole pipeline of the family, with all ``weights`` if asked."""
    require_pipeline(directory, family.pipeline, family.components)
    refuse_quantised(directory, family.components)  # before counts and shapes, which packed weights have others of
    family.check(directory)
    for component in family.components if weights else ():
        if component == family.network_component or component.startswith(("text_encoder", "vae")):
            require_weights(directory / component)
        if component.startswith("tokenizer"):
            require_tokenizer(directory / component)
    _require_own_weights(directory / family.network_component, family)
    for component, tensors in family.marks(directory).items():
        require_tensors(directory / component, tensors)


def require_alike(
    family: ModelFamily, directory: Path, other_flag: str, other: Path, known: Path | None = None
) -> None:
    """Raises ConfigError unless two networks of a run can look at each other's samples and read the same text; by
    sizes first, then by content."""
    here, there = family.shared(directory), family.shared(other)
    for name in here:
        if here[name] != there[name]:
            raise ConfigError(
                f"its {name} are {here[name]}, and those of {other_flag} {other} are {there[name]}; samples and text "
                "go from one to the other, so name checkpoints that share them"
            )
    require_same_content(family.components, directory, other_flag, other, known)


def distilled(directory: Path) -> str:
    """By what a pipeline is seen to be a few-step student; empty where it is not."""
    if is_file(directory / STUDENTS):
        return STUDENTS
    scheduler = read_json(directory / "model_index.json").get("scheduler")
    kind = scheduler[-1] if isinstance(scheduler, list) and scheduler else ""
    return f"scheduler {kind}" if kind == "FlowMatchLCMScheduler" else ""


def _require_own_weights(component: Path, family: ModelFamily) -> None:
    """The weights, where they are there, are of the network that config.json describes, to the last parameter."""
    found = safetensors_parameters(component)
    described = family.count_parameters(read_json(component / "config.json"))
    if found is not None and found != described:
        raise ConfigError(
            f"the weights in {component} have {found:,} parameters, and the network of its config.json has "
            f"{described:,}; download both again from one place"
        )
