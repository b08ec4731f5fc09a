"""Consistency of pipeline directories and of a run's networks, checked without torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from miles_dmd.errors import ConfigError
from miles_dmd.inputs import is_file
from miles_dmd.pipelines.comparison import require_same_content
from miles_dmd.pipelines.directory import (
    VOCABULARIES,
    require_pipeline,
    require_tokenizer,
    require_tokenizer_class,
)
from miles_dmd.pipelines.documents import read_json
from miles_dmd.pipelines.foreign import other_weights
from miles_dmd.pipelines.quantised import refuse_quantised
from miles_dmd.pipelines.weights import require_tensors, require_weights, weight_files

if TYPE_CHECKING:
    from miles_dmd.modalities.diffusion.family import DiffusionFamily

STUDENTS = "distillation.json"
"""Name of the file that a run leaves in the student that it exports."""


def check_pipeline(directory: Path, family: DiffusionFamily, *, weights: bool) -> None:
    """Raises ConfigError unless ``directory`` is a whole pipeline of the family, with all ``weights`` if asked."""
    require_pipeline(directory, family.pipeline, family.components)
    refuse_quantised(directory, family.components)  # before counts and shapes, which packed weights have others of
    family.check(directory)
    for component in family.components:
        folder = directory / component
        if holds_weights(component, family) and (weights or not is_lacking(folder, family)):
            require_weights(folder, family.pipeline)
        if component.startswith("tokenizer"):
            require_tokenizer_class(folder, read_json(directory / "model_index.json")[component])
        if component.startswith("tokenizer") and (weights or not is_lacking(folder, family)):
            require_tokenizer(folder)
    network = directory / family.network_component
    require_tensors(network, family.parameters(read_json(network / "config.json")), buffers=family.saved_buffers)
    for component, tensors in family.marks(directory).items():
        require_tensors(directory / component, tensors)


def require_alike(
    family: DiffusionFamily, directory: Path, other_flag: str, other: Path, known: Path | None = None
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


def holds_weights(component: str, family: DiffusionFamily) -> bool:
    return component == family.network_component or component.startswith(("text_encoder", "vae"))


def lacking(directory: Path, family: DiffusionFamily) -> list[str]:
    """Components of which only the configuration is there: a dry run needs no more, and a run refuses them."""
    return [name for name in family.components if is_lacking(directory / name, family)]


def is_lacking(component: Path, family: DiffusionFamily) -> bool:
    if component.name.startswith("tokenizer"):
        return not any(is_file(component / name) for name in VOCABULARIES)
    if not holds_weights(component.name, family):
        return False
    files = weight_files(component)
    return not any(map(is_file, files)) and not other_weights(component, files[0].name, family.pipeline)
