"""Names and numbers in the header of a safetensors file, without its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_dmd.errors import CheckpointError
from miles_dmd.inputs import MIB, parse_object

LARGEST = 100 * MIB
"""The format's own bound."""


@dataclass(frozen=True, slots=True)
class Header:
    path: Path
    names: frozenset[str]
    notes: Mapping[str, str]
    """Metadata that the writer put beside the tensors."""

    def numbers(self, note: str) -> Mapping[str, Any]:
        """A note that holds a JSON object. Raises CheckpointError."""
        try:
            return parse_object(self.notes[note])
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"{self.path} has no readable note {note!r} ({error})") from None


def read_header(path: Path) -> Header:
    """Raises CheckpointError. A file starts with the length of its JSON header: u64, little end."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = parse_object(file.read(length) if length <= LARGEST else b"")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is no safetensors file: {error}") from None
    notes = header.pop("__metadata__", {})
    if not isinstance(notes, dict):
        raise CheckpointError(f"{path} is no safetensors file: its notes are no object")
    return Header(path, frozenset(header), {name: str(value) for name, value in notes.items()})
