"""Batches as safetensors files, with sample ids in the header."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from miles_dmd.contracts.samples import DenoisingBatch
from miles_dmd.errors import CheckpointError
from miles_dmd.files import write_synced

FORMAT = 1
_TENSORS = ("latents", "sigma", "clean")
_NUMBERS = ("ids", "prompt_ids", "stop_steps", "policy_version", "run_seed")


def write_batch(path: Path, batch: DenoisingBatch) -> None:
    """``batch`` without conditions, which are looked up by prompt. Raises OSError."""
    numbers = {"format": FORMAT, **{name: getattr(batch, name) for name in _NUMBERS}}
    tensors = {name: getattr(batch, name).contiguous() for name in _TENSORS}
    write_synced(path, save(tensors, {"batch": json.dumps(numbers)}))


def read_batch(path: Path) -> DenoisingBatch:
    """Raises CheckpointError."""
    try:
        with safe_open(str(path), "pt") as file:
            numbers = json.loads((file.metadata() or {})["batch"])
            tensors = {name: file.get_tensor(name) for name in _TENSORS}
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path} is no batch: {error}") from error
    if not isinstance(numbers, dict) or numbers.pop("format", None) != FORMAT:
        raise CheckpointError(f"{path} is a batch of another format; this version reads format {FORMAT}")
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in numbers.items()
    }
    try:
        return DenoisingBatch(**values, **tensors)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is no batch: {error}") from error
