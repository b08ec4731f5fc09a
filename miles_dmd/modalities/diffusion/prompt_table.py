"""Size of the table of encoded prompts, and room for it on the disk of --cache-dir."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

from miles_dmd.errors import ConfigError
from miles_dmd.inputs import exists
from miles_dmd.modalities.diffusion.family import diffusion_family
from miles_dmd.preflight.resolved import ResolvedRun
from miles_dmd.shown import byte_size

BYTES = {"fp32": 4, "bf16": 2}
"""Bytes of one number of an embedding, by --compute-dtype."""
SLACK = 1 << 20
"""Bytes by which a file that holds the table may be larger than its rows: its header."""


def table_bytes(run: ResolvedRun) -> int:
    """Bytes on disk of all prompts of a run, encoded, and of the negative prompt."""
    family = diffusion_family(run.args)
    shapes = family.condition_shapes(run.args.teacher_directory, family.text_length(run.args))
    num_texts = len(set(run.prompts)) + 1
    return num_texts * sum(map(math.prod, shapes.values())) * BYTES[run.args.compute_dtype]


def check_room(run: ResolvedRun) -> None:
    """Raises ConfigError where the encoded prompts have no room on their disk, and may not be there already.

    Which table is this run's is known once all of the text encoders' files have been read, so any of its size counts.
    """
    needed, cache = table_bytes(run), Path(run.args.cache_dir).expanduser()
    free = shutil.disk_usage(next(place for place in (cache, *cache.absolute().parents) if exists(place))).free
    kept = [path.stat() for path in (cache / "prompts").glob("*") if path.suffix in (".safetensors", ".partial")]
    alike = [status.st_blocks * 512 for status in kept if needed <= status.st_size <= needed + SLACK]
    if needed > free + max(alike, default=0):
        raise ConfigError(
            f"--cache-dir {run.args.cache_dir}: the encoded prompts need {byte_size(needed)}, and {byte_size(free)} are"
            " free on its disk; make room, or name another directory"
        )
