"""Prompt embeddings: encoded once, kept on disk, looked up by prompt id.

At SD3.5's size an embedding is 2.6 MiB a sample, twenty times the latents, so batches carry ids and every process reads
the rows that it needs from one memory-mapped file.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from miles_dmd import registry
from miles_dmd.config.checkpoints import encoder_fingerprint
from miles_dmd.contracts.family import ModelFamily
from miles_dmd.contracts.samples import Cond
from miles_dmd.errors import ConfigError
from miles_dmd.files import digests
from miles_dmd.network.pretrained import opening

HELD_BYTES = 64 << 20
"""A table up to this size is kept in memory; rows of a larger one are read from the file."""


class PromptTable:
    """Rows of a table file; the last one is the unconditional branch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise ConfigError(
                f"--cache-dir: {path} is not there; pass a --cache-dir that every node of the cluster shares"
            )
        self._held = load_file(str(path)) if path.stat().st_size <= HELD_BYTES else None
        with safe_open(str(path), "pt") as file:
            self.names = tuple(sorted(file.keys()))
            self.num_prompts = file.get_slice(self.names[0]).get_shape()[0] - 1

    def lookup(self, prompt_ids: Sequence[int]) -> Cond:
        """Conditions of B prompts, on the CPU; every distinct row is read once."""
        rows = sorted(set(prompt_ids))
        if rows and not 0 <= rows[0] <= rows[-1] <= self.num_prompts:
            raise IndexError(f"prompt ids {rows[0]}..{rows[-1]} lie outside {self.path}, which has {self.num_prompts}")
        if self._held is not None:
            return {name: column[torch.tensor(prompt_ids)] for name, column in self._held.items()}
        place = {row: index for index, row in enumerate(rows)}
        index = torch.tensor([place[row] for row in prompt_ids])
        with safe_open(str(self.path), "pt") as file:
            return {name: self._rows(file.get_slice(name), rows)[index] for name in self.names}

    def unconditional(self, count: int) -> Cond:
        """The unconditional branch, once for each of ``count`` samples."""
        return self.lookup([self.num_prompts] * count)

    @staticmethod
    def _rows(column: object, rows: Sequence[int]) -> Tensor:
        return torch.cat([column[row : row + 1] for row in rows])  # type: ignore[index]


def ensure_table(args: Any, texts: Sequence[str], device: torch.device) -> Path:
    """The table of a run's prompts, encoded now if no earlier run with the same encoders and texts has left it."""
    family: ModelFamily = registry.load("models", args.model_family)
    checkpoint = Path(args.teacher_path)
    length = family.text_length(args)
    path = table_path(
        family,
        checkpoint,
        texts,
        args.negative_prompt,
        max_sequence_length=length,
        dtype=args.compute_dtype,
        cache_dir=Path(args.cache_dir).expanduser(),
    )
    if not path.exists():
        write_table(
            path,
            family,
            checkpoint,
            texts,
            args.negative_prompt,
            max_sequence_length=length,
            dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[args.compute_dtype],
            device=device,
        )
    return path


def table_path(
    family: ModelFamily,
    checkpoint: Path,
    texts: Sequence[str],
    negative_prompt: str,
    *,
    max_sequence_length: int,
    dtype: str,
    cache_dir: Path,
) -> Path:
    """Where the table of these prompts lies, whether it is there or not: named by a hash of all that it depends on."""
    key = {
        "format": 1,
        "encoders": encoder_fingerprint(family.components, checkpoint, digests(cache_dir)),
        "texts": list(texts),
        "negative_prompt": negative_prompt,
        "max_sequence_length": max_sequence_length,
        "dtype": dtype,
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_dir / "prompts" / f"{digest[:32]}.safetensors"


def write_table(
    path: Path,
    family: ModelFamily,
    checkpoint: Path,
    texts: Sequence[str],
    negative_prompt: str,
    *,
    max_sequence_length: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Encode all prompts and the unconditional branch. The file appears whole or not at all, also if two runs race."""
    with opening("its text encoders", checkpoint):
        table = family.code().encode_prompts(
            checkpoint, [*texts, negative_prompt], max_sequence_length=max_sequence_length, dtype=dtype, device=device
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".partial")
    os.close(handle)
    try:
        save_file(table, name)
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
