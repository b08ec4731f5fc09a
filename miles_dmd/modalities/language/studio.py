"""Studio of language models: samples of student and teacher as texts, export as a transformers directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from miles_dmd.contracts.engine import RolloutEngine, RolloutRequest
from miles_dmd.modalities.language.family import language_family
from miles_dmd.training.compute import Compute

if TYPE_CHECKING:
    from miles_dmd.config.args import Args

WEIGHTS_NAME = "model{suffix}.safetensors"
Texts = tuple[list[tuple[str, str]], Mapping[str, float]]
"""(prompt, response) of each sample, and numbers about them."""


class LanguageStudio:
    def __init__(self, args: Args, compute: Compute) -> None:
        self.args, self.compute, self._family = args, compute, language_family(args)

    def show(self, engine: RolloutEngine, requests: Sequence[RolloutRequest], reference: None) -> Texts:
        batch: Any = engine.generate(requests)
        return self._texts(batch)
