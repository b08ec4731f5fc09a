"""JSON records of a checkpoint: driver state, trainer arguments, optimizer and scheduler steps.

driver.json             where the driver is
<group>/args.json       how a trainer was asked
<group>/trainer.json    where it is: steps of its optimizer, scheduler and average
<group>/rank_0.json     random state of a rank
rollout.json            that of the rollout worker
random.json             that of the driver, where hooks run
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
from miles_dmd.errors import CheckpointError, FormatError
from miles_dmd.generators import set_random_state

ROLLOUT_STATE, DRIVER_STATE = "rollout.json", "random.json"
FORMAT = 1
"""Of all of them."""
OBSERVERS = {
    "alarms": {
        "series": Named(Each(NUMBER)),
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
TRAINED_ROLE = {
    "parameters": Each(TEXT),
    "optimizer_steps": Named(POSITIVE),
    "scheduler_steps": NATURAL,
    "average_steps": NATURAL_OR_NULL,
}
TRAINER = {"format": POSITIVE, "ranks": POSITIVE, "roles": Named(TRAINED_ROLE)}
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


def restore_generators(path: Path, *required: str) -> None:
    """The global random generators of this process, as ``path`` holds them, and these without fail. Raises
    CheckpointError."""
    try:
        state = read_json(path)
        if missing := [name for name in required if name not in state]:
            raise KeyError(missing[0])
        set_random_state(state)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"{path} holds no random state: {' '.join(str(error).split())}") from error


def _read(path: Path, shape: Any) -> dict[str, Any]:
    content = read_json(path)
    version = content.get("format")
    if type(version) is not int or version != FORMAT:  # True is 1
        raise FormatError(f"{path} has format {version!r}; this version reads format {FORMAT}")
    require_shape(content, shape, path)
    return content
