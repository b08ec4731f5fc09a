"""Batches as safetensors files, with sample ids in the header."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from miles_dmd.errors import CheckpointError
from miles_dmd.files import write_synced

FORMAT = 1
B = TypeVar("B")


def write_batch(path: Path, batch: Any) -> None:
    """Write a batch of any modality: its tensors, and its other fields in the header. Raises OSError.

    A field that is None is looked up again by whoever needs it.
    """
    fields = {row.name: getattr(batch, row.name) for row in dataclasses.fields(batch)}
    numbers = {name: value for name, value in fields.items() if value is not None and not isinstance(value, Tensor)}
    tensors = {name: value.contiguous() for name, value in fields.items() if isinstance(value, Tensor)}
    write_synced(path, save(tensors, {"batch": json.dumps({"format": FORMAT, **numbers})}))


def read_batch(path: Path, kind: type[B]) -> B:
    """A batch of the class ``kind``. Raises CheckpointError."""
    try:
        with safe_open(str(path), "pt") as file:
            numbers = json.loads((file.metadata() or {})["batch"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path} is no batch: {error}") from error
    if not isinstance(numbers, dict) or numbers.pop("format", None) != FORMAT:
        raise CheckpointError(f"{path} is a batch of another format; this version reads format {FORMAT}")
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in numbers.items()
    }
    try:
        return kind(**values, **tensors)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is no batch: {error}") from error
