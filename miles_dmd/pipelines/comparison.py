"""Components that all networks of a run share, compared by content: text encoders, tokenizers and the VAE."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from miles_dmd.errors import ConfigError
from miles_dmd.files import digest_file
from miles_dmd.inputs import is_file
from miles_dmd.pipelines.documents import read_json
from miles_dmd.pipelines.weights import weight_files

SHARED = ("text_encoder", "tokenizer", "vae")
"""Prefixes of the names of shared components."""
OF_TOKENIZERS = ("tokenizer.json", "spiece.model", "vocab.json", "merges.txt", "added_tokens.json")
SETTINGS = ("config.json", "tokenizer_config.json", "special_tokens_map.json")
OF_THE_WRITER = (
    "transformers_version", "torch_dtype", "dtype", "name_or_path", "backend", "is_local", "local_files_only",
)  # fmt: skip
"""Settings that say who wrote a file and how, not what is in it; so do names with an underscore in front."""


def require_same_content(
    components: Iterable[str], directory: Path, other_flag: str, other: Path, known: Path | None = None
) -> None:
    """Raises ConfigError, naming the file, unless both directories share what encodes prompts and decodes latents.

    Prompts are encoded once, samples are decoded once, and both travel in the exported student: what is exported would
    not be what was trained. The folder ``known`` remembers digests of large files.
    """
    if directory.resolve() == other.resolve():
        return
    for component in components:
        if component.startswith(SHARED) and (name := _difference(directory / component, other / component, known)):
            raise ConfigError(
                f"its {component} is not that of {other_flag} {other} ({name} differs); a run has one text encoding "
                f"and one latent space, and exports both, so put the same {component} into both directories"
            )


def _difference(here: Path, there: Path, known: Path | None) -> str:
    """The name of the first file that tells two components apart; empty where none does."""
    for name in SETTINGS:
        if _settings(here / name) != _settings(there / name):
            return name
    names = _vocabularies(here, there) if here.name.startswith("tokenizer") else _weights(here, there)
    return next((name for name in names if not _same(here / name, there / name, known)), "")


def _vocabularies(here: Path, there: Path) -> Iterable[str]:
    """tokenizer.json holds all of it; the others are what it was made from, or stand in for it."""
    whole, *parts = OF_TOKENIZERS
    return (whole,) if is_file(here / whole) and is_file(there / whole) else parts


def _weights(here: Path, there: Path) -> Iterable[str]:
    """None unless both are there: a dry run needs none."""
    files = [*weight_files(here), *weight_files(there)]
    if not all(map(is_file, files)):
        return ()
    return dict.fromkeys(path.name for path in files)


def _settings(path: Path) -> dict[str, Any]:
    if not is_file(path):
        return {}
    content = read_json(path)
    return {name: value for name, value in content.items() if not name.startswith("_") and name not in OF_THE_WRITER}


def _same(one: Path, other: Path, known: Path | None) -> bool:
    if not is_file(one) or not is_file(other):
        return is_file(one) == is_file(other)
    if one.samefile(other):
        return True
    return one.stat().st_size == other.stat().st_size and _digest(one, known) == _digest(other, known)


def _digest(path: Path, known: Path | None) -> bytes:
    digest = hashlib.sha256()
    digest_file(digest, path, known)
    return digest.digest()
