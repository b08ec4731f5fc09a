"""Role contract: the argument that names the weights of each model that a trainer group may hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Role:
    """A value, not a subclass: the trainer is the same for every role. Which of the models a run really holds, and
    which one trains, is the plan's to say."""

    pipelines: Mapping[str, str]
    """logical role -> name of the argument that holds the pipeline directory of its weights."""
