"""Language model families: what a declaration says of a transformers directory, and the code that computes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from miles_dmd import registry
from miles_dmd.contracts.family import FamilyCode, ModelFamily
from miles_dmd.errors import ConfigError

if TYPE_CHECKING:
    from miles_dmd.config.args import Args


def language_family(args: Args) -> LanguageFamily:
    """The family of a run of this modality."""
    return cast("LanguageFamily", registry.load("models", args.model_family))


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageFamily(ModelFamily):
    """The declaration of a family of transformers directories: the network, its tokenizer and its end tokens."""

    check: Callable[[Path, bool], None]
    """``check(directory, weights)`` raises ConfigError, ``FILE: what is wrong; cure``, unless it is a whole model, with
    its weights if asked."""
    vocabulary: Callable[[Path], Mapping[str, int]]
    """Token -> id, of the directory's tokenizer."""
    missing: Callable[[Path], list[str]]
    """Parts of which only the configuration is there."""
    identity: Callable[[Path, Path | None], str]
    """SHA-256 over all files that make up the model; a folder, if given, remembers those of large files."""
    max_positions: Callable[[Path], int | None]
    """Most tokens, prompt and response together, that the network has positions for; None where it says none."""

    @property
    def modality(self) -> str:
        return "language"

    @property
    def mark(self) -> str:
        return "config.json"

    def require(self, directory: Path, *, weights: bool) -> None:
        self.check(directory, weights)

    def require_alike(self, directory: Path, other_flag: str, other: Path, known: Path | None) -> None:
        """One vocabulary: a token id means the same to student and teacher."""
        here, there = self.vocabulary(directory), self.vocabulary(other)
        if here != there:
            token = next(name for name in {**here, **there} if here.get(name) != there.get(name))
            raise ConfigError(
                f"its tokenizer is not that of {other_flag} {other}: token {token!r} has id {here.get(token)} here and "
                f"{there.get(token)} there; student and teacher must share one vocabulary"
            )

    def lacking(self, directory: Path) -> list[str]:
        return self.missing(directory)

    def fingerprint(self, directory: Path, known: Path | None) -> str:
        return self.identity(directory, known)

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
