"""Comparison of arguments with those of a checkpoint: which differences alter training.

Every trainer's arguments are recorded as they were resolved, and what its weights started from by content, not by path.
"""

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_dmd import registry
from miles_dmd.checkpoint.records import FORMAT
from miles_dmd.config.args import GROUPS, Args
from miles_dmd.config.trainers import trainer_args
from miles_dmd.config.values import kinds
from miles_dmd.errors import CheckpointError
from miles_dmd.files import digest_file, digests
from miles_dmd.registry import nearest

HARMLESS = frozenset(kinds(GROUPS["Run"])) - {"seed"} | {
    "load",
    "save",
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
        """As --allow-changed takes it."""
        return "-".join(part.replace("_", "-") for part in (self.trainer, self.argument) if part)

    def __str__(self) -> str:
        return f"{self.name} was {self.was}, is {self.now}"


def recorded_arguments(args: Args) -> dict[str, dict[str, Any]]:
    """trainer -> what args.json says of it, as JSON has it."""
    return {
        role: {"format": FORMAT, "arguments": _flat(own), "sources": _sources(own, role)}
        for role, own in trainer_args(args).items()
    }


def changes(recorded: Mapping[str, Mapping[str, Any]], args: Args) -> list[Change]:
    """Differences that alter training, whether allowed or not."""
    now = recorded_arguments(args)
    rows = [
        Change(argument, trainer, was, is_)
        for trainer in now
        for argument, was, is_ in _differences(recorded.get(trainer, {}), now[trainer])
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


def _differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    old, new = was.get("arguments", {}), now["arguments"]
    harmless = HARMLESS | {alarm.option for alarm in registry.load("losses", new["loss_type"]).alarms}
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
    options = {name: getattr(args.loss_options, name) for name in kinds(type(args.loss_options))}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in {**values, **options}.items()}


def _sources(args: Args, role: str) -> dict[str, dict[str, str]]:
    """argument -> where and what the weights started from that this trainer holds."""
    components = registry.load("models", args.model_family).components
    paths = {name: getattr(args, name) for name in dict.fromkeys(registry.load("roles", role).pipelines.values())}
    return {
        "teacher_checkpoint" if name == "teacher_path" else name: {
            "path": str(path), "sha256": pipeline_fingerprint(path, tuple(components), digests(args.cache_dir))
        }
        for name, path in paths.items()
    }  # fmt: skip


def pipeline_fingerprint(directory: str, components: tuple[str, ...], known: Path | None = None) -> str:
    """SHA-256 over the files of a pipeline's components; the folder ``known`` remembers those of large ones."""
    digest = hashlib.sha256()
    for component in components:
        for path in sorted((Path(directory) / component).rglob("*")):
            if path.is_file():
                digest.update(os.fsencode(path.relative_to(directory)))
                digest_file(digest, path, known)
    return digest.hexdigest()
