"""JSON records of a checkpoint: driver state, trainer arguments, optimizer and scheduler steps.

driver.json             where the driver is
<group>/args.json       how a trainer was asked
<group>/trainer.json    where it is: steps of its optimizer, scheduler and average
<group>/rank_0.json     random state of a rank
rollout.json            that of the rollout worker
random.json             that of the driver, where hooks run
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles_dmd.checkpoint.manifest import COUNTERS, read_json, require_fields, require_format
from miles_dmd.checkpoint.manifest import FORMAT as FORMAT
from miles_dmd.errors import CheckpointError
from miles_dmd.generators import set_random_state
from miles_dmd.validators import Check, a, count, each, fields, number, optional, positive, string, table

ROLLOUT_STATE, DRIVER_STATE = "rollout.json", "random.json"
OBSERVERS = {
    "alarms": fields({"series": table(each(number)), "ringing": each(string)}),
    "grids": fields({"of": string, "reference": optional(fields({"spread": number, "limit": number}), {})}),
    "best": fields(
        {
            "metric": string,
            "way": string,
            "values": each(optional(number)),
            "best": optional(fields({"metric": string, "value": number, "global_step": positive}), {}),
        }
    ),
    "skips": fields({"total": count, "in_a_row": count}),
    "draws": fields({"size": positive, "since": count, "batches": count}),
}
"""State of observers, carried from cycle to cycle; hooks of the user's own come on top."""
DRIVER = {
    "format": positive,
    "run": string,
    "seed": count,
    "counters": COUNTERS,
    "prompts": fields({"format": positive, "cursor": count, "seed": count, "digest": string}),
    "policy_version": count,
    "pending": each(fields({"samples": positive, "policy_version": count})),
    "plan": a(dict),
    "observers": fields(OBSERVERS, open_ended=True),
}
TRAINED_ROLE = {
    "parameters": each(string),
    "optimizer_steps": table(positive),
    "scheduler_steps": count,
    "average_steps": optional(count),
}
TRAINER = {"format": positive, "ranks": positive, "roles": table(fields(TRAINED_ROLE))}
SOURCE = {"path": string, "sha256": string}
ARGUMENTS = {"format": positive, "arguments": a(dict), "sources": table(fields(SOURCE))}


def read_driver(checkpoint: Path) -> dict[str, Any]:
    """Raises CheckpointError, FormatError."""
    return _read(checkpoint / "driver.json", DRIVER)


def read_arguments(checkpoint: Path, group: str) -> dict[str, Any]:
    """Raises CheckpointError, FormatError."""
    return _read(checkpoint / group / "args.json", ARGUMENTS)


def read_trainer(directory: Path) -> dict[str, Any]:
    """trainer.json of the group whose folder is ``directory``. Raises CheckpointError, FormatError."""
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


def _read(path: Path, checks: Mapping[str, Check]) -> dict[str, Any]:
    content = read_json(path)
    require_format(content, path)
    require_fields(content, checks, path)
    return content
