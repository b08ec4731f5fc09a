"""Fingerprints of components: SHA-256 over names and contents of their files."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from miles_dmd.files import digest_file


def fingerprint(directory: Path, components: Iterable[str], known: Path | None = None) -> str:
    """Hexadecimal SHA-256 over all files of these folders; the folder ``known`` remembers those of large files."""
    digest = hashlib.sha256()
    for component in components:
        for path in sorted((directory / component).rglob("*")):
            if path.is_file():
                digest.update(os.fsencode(path.relative_to(directory)))
                digest_file(digest, path, known)
    return digest.hexdigest()


def text_components(components: Iterable[str]) -> list[str]:
    """The components that turn text into embeddings: encoders and tokenizers."""
    return [name for name in components if name.startswith(("text_encoder", "tokenizer"))]
