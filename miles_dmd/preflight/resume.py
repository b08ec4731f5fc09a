"""Validation of the checkpoint that --load names, before any worker is touched.

Its manifest and the presence of its files, the plan, the arguments, the prompts, the counters, the disk; the checksums
of the tensors, which take a while, by ``verify``.
"""

import dataclasses
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_dmd.checkpoint.manifest import Manifest, check_presence, check_sums, read_manifest
from miles_dmd.checkpoint.records import read_arguments, read_driver
from miles_dmd.checkpoint.store import cycle_of, find_checkpoint, whole_checkpoints
from miles_dmd.config.args import Args
from miles_dmd.errors import CheckpointError, ConfigError, FormatError
from miles_dmd.plan import DistillationPlan
from miles_dmd.plan.frozen import plain
from miles_dmd.preflight.changes import ABSENT, Change, changes, refuse_changes
from miles_dmd.preflight.coherence import check_coherence
from miles_dmd.preflight.resolved import ResolvedRun
from miles_dmd.preflight.run_directory import continues
from miles_dmd.prompts import PromptSource
from miles_dmd.shown import printable


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
        said = f"Checkpoint {self.directory} would load: cycle {self.manifest.cycle}, run {self.manifest.run}{allowed}"
        return "\n".join(map(printable, said.split("\n")))

    def verify(self) -> None:
        """Checksums of all files. Raises CheckpointError."""
        check_sums(self.directory, self.manifest)


def open_resume(run: ResolvedRun) -> Resume | None:
    """The checkpoint that --load names, all but its tensors verified; None without --load. Raises CheckpointError, one
    line."""
    args = run.args
    if args.load is None:
        return None
    try:
        directory = find_checkpoint(args.load, args.save).resolve()
        manifest = read_manifest(directory)
        check_presence(directory, manifest)
        check_sums(directory, manifest, lambda path: path.endswith(".json"))
        resume = Resume(directory, manifest, read_driver(directory))
        return Resume(directory, manifest, resume.driver, tuple(_check(run, resume)))
    except (CheckpointError, FormatError) as error:
        raise CheckpointError(f"--load {args.load}: {error}") from error


def _check(run: ResolvedRun, resume: Resume) -> list[Change]:
    _check_one_run(resume)
    args, plan, manifest = run.args, run.plan, resume.manifest
    _check_plan(plan, args, resume)
    _check_counters(plan, args, resume)
    recorded = {name: read_arguments(resume.directory, name) for name in manifest.groups}
    allowed = refuse_changes(changes(recorded, run), args.allow_changed)
    try:
        PromptSource(args.prompt_data or "", args.seed).load_state_dict(resume.driver["prompts"])
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    _check_pending(run, resume)
    check_coherence(plan, resume.directory, manifest, resume.driver, recorded, run.alarms)
    _check_disk(args, resume)
    return allowed


def _check_one_run(resume: Resume) -> None:
    """Files that are sound each may still not belong together."""
    driver, manifest = resume.driver, resume.manifest
    said = [manifest.run, manifest.counters, manifest.policy_version]
    if said != [driver["run"], driver["counters"], driver["policy_version"]]:
        raise CheckpointError("manifest.json and driver.json are of different runs or cycles; it is not loaded")
    if driver["seed"] != driver["prompts"]["seed"]:
        raise CheckpointError(f"driver.json has seed {driver['seed']}, and prompts of {driver['prompts']['seed']}")


def _check_plan(plan: DistillationPlan, args: Args, resume: Resume) -> None:
    """Compare plans. The origin of weights is part of one, but is compared by content, with the arguments."""
    manifest = resume.manifest
    if manifest.loss_type != args.loss_type:
        raise CheckpointError(f"is of --loss-type {manifest.loss_type}, and this run of {args.loss_type}; give that")
    was, now = dict(_leaves(resume.driver["plan"])), dict(_leaves(plain(plan)))
    apart = [
        f"{name} was {before}, is {after}"
        for name in sorted(was.keys() | now.keys())
        for before, after in [(was.get(name, ABSENT), now.get(name, ABSENT))]
        if (type(before), before) != (type(after), after) and not _both_models(name, was, now)
    ]
    said = manifest.plan
    if said["fingerprint"] != plan.fingerprint and was == now:  # of weights that have moved, it is another one
        apart.append("its own fingerprint is wrong")
    if (said["name"], said["version"]) != (plan.name, plan.version) or set(manifest.groups) != set(plan.groups):
        apart.append("manifest.json names another plan, or other groups, than driver.json")
    if apart:
        raise CheckpointError(
            f"belongs to another plan (fingerprint {said['fingerprint'][:12]}, this run's is "
            f"{plan.fingerprint[:12]}): {'; '.join(apart)}; give the old arguments"
        )


def _both_models(name: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    return name.endswith(".model_ref") and isinstance(was.get(name), str) and isinstance(now.get(name), str)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    rows = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else None
    if not rows or not value:
        yield path, value
        return
    for name, item in rows:
        yield from _leaves(item, f"{path}.{name}".lstrip("."))


def _check_counters(plan: DistillationPlan, args: Args, resume: Resume) -> None:
    counters = resume.manifest.counters
    due = plan.update_schedule.counters_after(counters["completed_cycles"])
    if dict(counters) != dataclasses.asdict(due):
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


def _check_pending(run: ResolvedRun, resume: Resume) -> None:
    pending, files = resume.driver["pending"], [entry.path for entry in resume.manifest.files]
    numbered = [f"pending/batch_{number:03d}.safetensors" for number in range(len(pending))]
    versions = {row["policy_version"] for row in pending}
    if [path for path in files if path.startswith("pending/")] != numbered or versions - {
        resume.manifest.policy_version
    }:
        raise CheckpointError("driver.json lists waiting samples that are not those of the checkpoint")
    ranks = math.lcm(*(own.num_trainer_ranks for own in run.trainers.values()))
    for row in pending:
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
