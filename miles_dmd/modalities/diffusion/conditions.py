"""Prompt embedding table: rows looked up by prompt id, in a file on disk.

At SD3.5's size an embedding is 2.6 MiB a sample, twenty times the latents, so batches carry ids and every process reads
the rows that it needs from one file.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch

from miles_dmd.errors import ConfigError
from miles_dmd.modalities.diffusion.batch import Cond
from miles_dmd.modalities.diffusion.table_file import read_layout


class PromptTable:
    """Rows of a table file; the last one is the unconditional branch. Nothing is read before it is looked up.

    Rows are read rather than mapped into memory: a file that is cut off meanwhile is an error, not a SIGBUS, and a
    process does not seem to hold what only the page cache holds.
    """

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for a file that is not there, or is not a whole table."""
        self.path = path
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise ConfigError(
                f"--cache-dir: {path} is not there; pass a --cache-dir that every node of the cluster shares"
            ) from None
        weakref.finalize(self, os.close, self._file)
        try:
            self._layout = read_layout(self._file)
        except (ValueError, OSError) as error:
            raise ConfigError(f"--cache-dir: {path} is no table of prompts ({error}); remove it") from error
        self.num_prompts = self._layout.num_rows - 1
        self.about = self._layout.about

    def lookup(self, prompt_ids: Sequence[int]) -> Cond:
        """Conditions of B prompts, on the CPU; every distinct row is read once."""
        rows = sorted(set(prompt_ids))
        if rows and not 0 <= rows[0] <= rows[-1] <= self.num_prompts:
            raise IndexError(f"prompt ids {rows[0]}..{rows[-1]} lie outside {self.path}, which has {self.num_prompts}")
        place = {row: index for index, row in enumerate(rows)}
        index = torch.tensor([place[row] for row in prompt_ids], dtype=torch.long)
        try:
            return {name: column[index] for name, column in self._layout.read(self._file, rows).items()}
        except OSError as error:
            raise ConfigError(f"--cache-dir: {self.path} cannot be read ({error}); remove it") from error

    def unconditional(self, count: int) -> Cond:
        """The unconditional branch, once for each of ``count`` samples."""
        return self.lookup([self.num_prompts] * count)
