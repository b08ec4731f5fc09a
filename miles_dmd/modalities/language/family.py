"""Language model families: what a declaration says of a transformers directory, and the code that computes."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from miles_dmd import registry
from miles_dmd.contracts.family import FamilyCode, ModelFamily
from miles_dmd.errors import ConfigError
from miles_dmd.pipelines import causal

if TYPE_CHECKING:
    from miles_dmd.config.args import Args


def language_family(args: Args) -> LanguageFamily:
    """The family of a run of this modality."""
    return cast("LanguageFamily", registry.load("models", args.model_family))


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageFamily(ModelFamily):
    """The declaration of a family of transformers directories: the network, its tokenizer and its end tokens."""

    @property
    def modality(self) -> str:
        return "language"

    @property
    def mark(self) -> str:
        return "config.json"

    def count_parameters(self, directory: Path) -> int:
        """Raises ConfigError: no formula here knows the parameters of every architecture."""
        raise ConfigError(f"{directory} lacks its weights, from whose headers parameters are counted; download them")

    def require(self, directory: Path, *, weights: bool) -> None:
        causal.require_model(directory, weights=weights)

    def require_alike(self, directory: Path, other_flag: str, other: Path, known: Path | None) -> None:
        """One vocabulary: a token id means the same to student and teacher."""
        causal.require_one_vocabulary(directory, other_flag, other)

    def max_positions(self, directory: Path) -> int | None:
        """Most tokens, prompt and response together, that the network has positions for; None where it says none."""
        return causal.max_positions(directory)

    def lacking(self, directory: Path) -> list[str]:
        return causal.lacking(directory)

    def fingerprint(self, directory: Path, known: Path | None) -> str:
        return causal.identity(directory, known)

    def distilled(self, directory: Path) -> str:
        """Nothing: a distilled language model is a teacher like any other."""
        return ""

    def code(self) -> LanguageCode:
        return cast("LanguageCode", importlib.import_module(self.torch_module))


class LanguageCode(FamilyCode, Protocol):
    """The part that knows torch and transformers: functions of a module."""

    def end_tokens(self, directory: Path) -> Sequence[int]:
        """Ids that end a response."""
        ...

    def open_tokenizer(self, directory: Path) -> Any:
        """The tokenizer of transformers."""
        ...
