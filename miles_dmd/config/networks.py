"""Consistency of pipeline directories and of a run's networks, checked without torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from miles_dmd.config.checkpoints import (
    read_json,
    require_pipeline,
    require_tensors,
    require_tokenizer,
    require_weights,
    safetensors_parameters,
)
from miles_dmd.errors import ConfigError

if TYPE_CHECKING:
    from miles_dmd.contracts.family import ModelFamily


def check_pipeline(directory: Path, family: ModelFamily, *, weights: bool) -> None:
    """Raises ConfigError unless ``directory`` is a whole pipeline of the family, with all ``weights`` if asked."""
    require_pipeline(directory, family.pipeline, family.components)
    family.check(directory)
    for component in family.components if weights else ():
        if component == family.network_component or component.startswith(("text_encoder", "vae")):
            require_weights(directory / component)
        if component.startswith("tokenizer"):
            require_tokenizer(directory / component)
    _require_own_weights(directory / family.network_component, family)
    for component, tensors in family.marks(directory).items():
        require_tensors(directory / component, tensors)


def require_alike(family: ModelFamily, directory: Path, other_flag: str, other: Path) -> None:
    """Raises ConfigError unless two networks of a run can look at each other's samples and read the same text."""
    here, there = family.shared(directory), family.shared(other)
    for name in here:
        if here[name] != there[name]:
            raise ConfigError(
                f"its {name} are {here[name]}, and those of {other_flag} {other} are {there[name]}; samples and text "
                "go from one to the other, so name checkpoints that share them"
            )


def _require_own_weights(component: Path, family: ModelFamily) -> None:
    """The weights, where they are there, are of the network that config.json describes, to the last parameter."""
    found = safetensors_parameters(component, family.saved_buffers)
    described = family.count_parameters(read_json(component / "config.json"))
    if found is not None and found != described:
        raise ConfigError(
            f"the weights in {component} have {found:,} parameters, and the network of its config.json has "
            f"{described:,}; download both again from one place"
        )
