"""Comparison of arguments with those of a checkpoint: which differences alter training.

Every trainer's arguments are recorded as they were resolved, and what its weights started from by content, not by path.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_dmd.checkpoint.records import FORMAT
from miles_dmd.config.args import (
    Args,
    CheckpointArgs,
    ClusterArgs,
    DeviceArgs,
    LoggingArgs,
    RunArgs,
    SampleArgs,
    WatchArgs,
)
from miles_dmd.config.values import kinds
from miles_dmd.errors import CheckpointError
from miles_dmd.files import digests
from miles_dmd.preflight.resolved import ResolvedRun
from miles_dmd.registry import nearest

_OBSERVING = (CheckpointArgs, SampleArgs, WatchArgs, LoggingArgs, DeviceArgs, ClusterArgs, RunArgs)
HARMLESS = frozenset(name for group in _OBSERVING for name in kinds(group)) - {"seed"} | {
    # how the work is cut up, which changes no result
    "num_trainer_ranks",
    "micro_batch_size",
    "rollout_micro_batch_size",
    "gradient_checkpointing",
    # compared by content: the prompts by their digest, what weights start from by a fingerprint of the files
    "prompt_data",
    "hf_checkpoint",
    "teacher_checkpoint",
}
"""Arguments that may differ without being named."""
ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class Change:
    """``trainer`` is empty where all trainers read the argument alike."""

    argument: str
    trainer: str
    was: Any
    now: Any

    @property
    def name(self) -> str:
        """Name that --allow-changed takes."""
        return "-".join(part.replace("_", "-") for part in (self.trainer, self.argument) if part)

    def __str__(self) -> str:
        return f"{self.name} was {self.was}, is {self.now}"


def recorded_arguments(run: ResolvedRun) -> dict[str, dict[str, Any]]:
    """trainer -> contents of its args.json."""
    return {
        group: {"format": FORMAT, "arguments": _flat(own), "sources": _sources(own, group, run)}
        for group, own in run.trainers.items()
    }


def changes(recorded: Mapping[str, Mapping[str, Any]], run: ResolvedRun) -> list[Change]:
    """Differences that alter training, whether allowed or not."""
    now = recorded_arguments(run)
    harmless = HARMLESS | run.modality.harmless | {alarm.option for alarm in run.loss_type.alarms}
    rows = [
        Change(argument, trainer, was, is_)
        for trainer in now
        for argument, was, is_ in _differences(recorded.get(trainer, {}), now[trainer], harmless)
    ]
    return list(_merged(rows, len(now)))


def refuse_changes(found: Iterable[Change], allowed: Iterable[str]) -> list[Change]:
    """The changes, all of them allowed. Raises CheckpointError that lists those that are not."""
    found = list(found)
    names = {name.lstrip("-").replace("_", "-") for name in allowed}
    known = {name.replace("_", "-") for change in found for name in (change.name, change.argument)}
    if unused := sorted(names - known):
        raise CheckpointError(f"--allow-changed {unused[0]}: that did not change{nearest(unused[0], sorted(known))}")
    refused = [c for c in found if c.name not in names and c.argument.replace("_", "-") not in names]
    if refused:
        raise CheckpointError(
            f"the run was trained with other arguments: {'; '.join(map(str, refused))}; give the old ones, or pass "
            f"--allow-changed {' '.join(change.name for change in refused)}"
        )
    return found


def _differences(
    was: Mapping[str, Any], now: Mapping[str, Any], harmless: frozenset[str]
) -> Iterator[tuple[str, Any, Any]]:
    old, new = was.get("arguments", {}), now["arguments"]
    if str(new["lr_scheduler"]).startswith("constant"):
        harmless |= {"num_rollout"}
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name, ABSENT), new.get(name, ABSENT)
        if before != after and name not in harmless:
            yield name, before, after
    for name, source in now["sources"].items():
        before = was.get("sources", {}).get(name, {"path": ABSENT, "sha256": ABSENT})
        if before["sha256"] != source["sha256"]:
            yield name, f"{before['path']} ({before['sha256'][:12]})", f"{source['path']} ({source['sha256'][:12]})"


def _merged(rows: list[Change], trainers: int) -> Iterator[Change]:
    """A change that every trainer shares is the run's."""
    seen: set[tuple[str, str]] = set()
    for row in rows:
        alike = [other for other in rows if (other.argument, other.was, other.now) == (row.argument, row.was, row.now)]
        whole = dataclasses.replace(row, trainer="") if len(alike) == trainers else row
        if (whole.argument, whole.trainer) not in seen:
            seen.add((whole.argument, whole.trainer))
            yield whole


def _flat(args: Args) -> dict[str, Any]:
    values = {name: getattr(args, name) for name in kinds(type(args))}
    for options in (args.modality_options, args.loss_options):
        values |= {name: getattr(options, name) for name in kinds(type(options))}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _sources(args: Args, group: str, run: ResolvedRun) -> dict[str, dict[str, str]]:
    """argument -> path and fingerprint of the weights that a group's models started from."""
    paths = {name: getattr(args, name) for name in dict.fromkeys(run.roles[group].pipelines.values())}
    return {
        "teacher_checkpoint" if name == "teacher_path" else name: {
            "path": str(path), "sha256": run.family.fingerprint(Path(path), digests(args.cache_dir))
        }
        for name, path in paths.items()
        if path is not None  # a server holds it
    }  # fmt: skip
