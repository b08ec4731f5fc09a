"""What does a run record beside its tensors? JSON files whose checksums are the manifest's, and whose fields are here.

driver.json             where the driver is
<group>/args.json       how a trainer was asked
<group>/trainer.json    where it is: steps of its optimizer, scheduler and average
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from miles_dmd.checkpoint.manifest import COUNTERS, read_json
from miles_dmd.checkpoint.shape import (
    NATURAL,
    NATURAL_OR_NULL,
    NUMBER,
    NUMBER_OR_NULL,
    OBJECT,
    POSITIVE,
    TEXT,
    Each,
    Maybe,
    Named,
    Open,
    require_shape,
)
from miles_dmd.errors import FormatError

FORMAT = 1
"""Of all of them."""
OBSERVERS = {
    "alarms": {
        "series": {"actor/teacher_critic_gap": Each(NUMBER), "critic/loss": Each(NUMBER)},
        "ringing": Each(TEXT),
    },
    "grids": {"of": TEXT, "reference": Maybe({"spread": NUMBER, "limit": NUMBER})},
    "best": {
        "metric": TEXT,
        "way": TEXT,
        "values": Each(NUMBER_OR_NULL),
        "best": Maybe({"metric": TEXT, "value": NUMBER, "global_step": POSITIVE}),
    },
    "skips": {"total": NATURAL, "in_a_row": NATURAL},
    "draws": {"size": POSITIVE, "since": NATURAL, "batches": NATURAL},
}
"""Those that remember something from cycle to cycle; hooks of the user's own come on top."""
DRIVER = {
    "format": POSITIVE,
    "run": TEXT,
    "seed": NATURAL,
    "counters": COUNTERS,
    "prompts": {"format": POSITIVE, "cursor": NATURAL, "seed": NATURAL, "digest": TEXT},
    "policy_version": NATURAL,
    "pending": Each({"samples": POSITIVE, "policy_version": NATURAL}),
    "plan": OBJECT,
    "observers": Open(OBSERVERS),
}
TRAINER = {
    "format": POSITIVE,
    "ranks": POSITIVE,
    "parameters": Each(TEXT),
    "optimizer_steps": Named(POSITIVE),
    "scheduler_steps": NATURAL,
    "average_steps": NATURAL_OR_NULL,
}
ARGUMENTS = {"format": POSITIVE, "arguments": OBJECT, "sources": Named({"path": TEXT, "sha256": TEXT})}


def read_driver(checkpoint: Path) -> dict[str, Any]:
    """Raises CheckpointError, FormatError."""
    return _read(checkpoint / "driver.json", DRIVER)


def read_arguments(checkpoint: Path, group: str) -> dict[str, Any]:
    """Raises CheckpointError, FormatError."""
    return _read(checkpoint / group / "args.json", ARGUMENTS)


def read_trainer(directory: Path) -> dict[str, Any]:
    """Of a group, whose folder ``directory`` is. Raises CheckpointError, FormatError."""
    return _read(directory / "trainer.json", TRAINER)


def _read(path: Path, shape: Any) -> dict[str, Any]:
    content = read_json(path)
    version = content.get("format")
    if type(version) is not int or version != FORMAT:  # True is 1
        raise FormatError(f"{path} has format {version!r}; this version reads format {FORMAT}")
    require_shape(content, shape, path)
    return content
