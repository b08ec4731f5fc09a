"""Would this run's checkpoint load? Everything that can be known of it before any worker is touched.

Its manifest and the presence of its files, the plan, the arguments, the prompts, the counters, the disk; the checksums
of the tensors, which take a while, by ``verify``.
"""

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_dmd import registry
from miles_dmd.checkpoint.manifest import Manifest, check_presence, check_sums, read_json, read_manifest
from miles_dmd.checkpoint.store import cycle_of, find_checkpoint, whole_checkpoints
from miles_dmd.config.args import Args
from miles_dmd.config.changes import Change, changes, refuse_changes
from miles_dmd.config.runs import continues
from miles_dmd.config.trainers import compute_trainer_args, compute_trainer_configs
from miles_dmd.errors import CheckpointError, ConfigError, FormatError
from miles_dmd.plan import DistillationPlan
from miles_dmd.plan.frozen import plain
from miles_dmd.prompts import PromptSource

FORMAT = 1
"""Of driver.json."""


@dataclass(frozen=True, slots=True)
class Resume:
    """A checkpoint that this run goes on from."""

    directory: Path
    manifest: Manifest
    driver: Mapping[str, Any]
    allowed: tuple[Change, ...] = ()
    """Changed arguments that --allow-changed named."""

    def __str__(self) -> str:
        allowed = "".join(f"\n  allowed: {change}" for change in self.allowed)
        return f"Checkpoint {self.directory} would load: cycle {self.manifest.cycle}, run {self.manifest.run}{allowed}"

    def verify(self) -> None:
        """Checksums of all files. Raises CheckpointError."""
        check_sums(self.directory, self.manifest)


def open_resume(args: Args) -> Resume | None:
    """What --load names, all but its tensors verified; None without --load. Raises CheckpointError, one line."""
    if args.load is None:
        return None
    try:
        directory = find_checkpoint(args.load, args.save).resolve()
        manifest = read_manifest(directory)
        check_presence(directory, manifest)
        check_sums(directory, manifest, lambda path: path.endswith(".json"))
        resume = Resume(directory, manifest, read_json(directory / "driver.json"))
        return Resume(directory, manifest, resume.driver, tuple(_check(args, resume)))
    except (CheckpointError, FormatError) as error:
        raise CheckpointError(f"--load {args.load}: {error}") from error


def _check(args: Args, resume: Resume) -> list[Change]:
    _check_format(resume)
    plan = registry.load("losses", args.loss_type).plan(args)
    _check_plan(plan, args, resume)
    _check_counters(plan, args, resume)
    recorded = {name: read_json(resume.directory / name / "args.json") for name in resume.manifest.groups}
    allowed = refuse_changes(changes(recorded, args), args.allow_changed)
    try:
        PromptSource(args.prompt_data or "", args.seed).load_state_dict(resume.driver["prompts"])
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    _check_pending(args, resume)
    _check_disk(args, resume)
    return allowed


def _check_format(resume: Resume) -> None:
    driver, manifest = resume.driver, resume.manifest
    if driver.get("format") != FORMAT:
        raise FormatError(f"driver.json has format {driver.get('format')!r}; this version reads format {FORMAT}")
    if driver.get("run") != manifest.run or driver.get("counters") != manifest.counters:
        raise CheckpointError("manifest.json and driver.json are of different runs or cycles; it is not loaded")


def _check_plan(plan: DistillationPlan, args: Args, resume: Resume) -> None:
    """Where weights came from is part of a plan, but is compared by content, with the arguments."""
    manifest = resume.manifest
    if manifest.loss_type != args.loss_type:
        raise CheckpointError(f"is of --loss-type {manifest.loss_type}, and this run of {args.loss_type}; give that")
    if manifest.plan["fingerprint"] == plan.fingerprint:
        return
    was, now = dict(_leaves(resume.driver["plan"])), dict(_leaves(plain(plan)))
    apart = [
        f"{name} was {was.get(name)}, is {now.get(name)}"
        for name in sorted(was.keys() | now.keys())
        if was.get(name) != now.get(name) and not name.endswith(".model_ref")
    ]
    if apart or was == now:
        raise CheckpointError(
            f"belongs to another plan (fingerprint {manifest.plan['fingerprint'][:12]}, this run's is "
            f"{plan.fingerprint[:12]}): {'; '.join(apart) or 'its own fingerprint is wrong'}; give the old arguments"
        )


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    rows = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else None
    if rows is None:
        yield path, value
        return
    for name, item in rows:
        yield from _leaves(item, f"{path}.{name}".lstrip("."))


def _check_counters(plan: DistillationPlan, args: Args, resume: Resume) -> None:
    counters = resume.manifest.counters
    due = plan.update_schedule.counters_after(int(counters["completed_cycles"]))
    steps = {role: due.optimizer_steps.get(role, 0) for role in counters["optimizer_steps"]}
    if counters["global_step"] != due.global_step or dict(counters["optimizer_steps"]) != steps:
        raise CheckpointError(f"counters {json.dumps(counters)} are not those that the plan reaches")
    if args.num_rollout < due.global_step:
        raise CheckpointError(f"has {due.global_step} student steps, more than --num-rollout {args.num_rollout}")
    if args.save is not None and continues(args):
        later = [path for path in whole_checkpoints(resume.directory.parent) if cycle_of(path) > resume.manifest.cycle]
        if later:
            raise CheckpointError(
                f"--save {args.save} holds the later {later[-1].name}, which would be in the way; go on from that "
                "one, or name another --save"
            )


def _check_pending(args: Args, resume: Resume) -> None:
    ranks = math.lcm(*(compute_trainer_args(args, t).num_trainer_ranks for t in compute_trainer_configs(args)))
    for row in resume.driver["pending"]:
        if row["samples"] % ranks:
            raise CheckpointError(
                f"holds sampled batches of {row['samples']}, which do not divide by {ranks}, the common multiple of "
                "--num-trainer-ranks; give ranks that do"
            )


def _check_disk(args: Args, resume: Resume) -> None:
    if args.save_interval == 0:
        return
    place = Path(args.save or "runs").resolve()
    nearest = next(path for path in (place, *place.parents) if path.exists())
    free, size = shutil.disk_usage(nearest).free, resume.manifest.size
    if free < size:
        raise CheckpointError(
            f"a checkpoint takes {size / 2**20:,.0f} MiB, and {nearest} has {free / 2**20:,.0f} MiB free; make room, "
            "or name another --save"
        )
