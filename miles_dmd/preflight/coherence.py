"""Cross-checks between the records of a checkpoint: files that are sound each, and vouched for, may still contradict.

Whoever edits one of them can write its checksum anew. What follows from another record is therefore compared with it:
positions from counters, optimizer steps from counters, names of tensors from their files.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from miles_dmd.checkpoint.manifest import Manifest
from miles_dmd.checkpoint.records import DRIVER_STATE, ROLLOUT_STATE, read_trainer
from miles_dmd.checkpoint.tensors import read_header
from miles_dmd.errors import CheckpointError
from miles_dmd.observe.alarms import Alarm
from miles_dmd.plan import DistillationPlan
from miles_dmd.plan.schedule import fresh_batches
from miles_dmd.shown import short_repr

_SHARD = re.compile(r"shard-[^/]+\.safetensors")
MOMENTS = ("exp_avg", "exp_avg_sq")


def check_coherence(
    plan: DistillationPlan,
    directory: Path,
    manifest: Manifest,
    driver: Mapping[str, Any],
    recorded: Mapping[str, Mapping[str, Any]],
    followed: Collection[Alarm],
) -> None:
    """``recorded`` are the arguments of each group, ``followed`` the alarms of this run.

    Raises CheckpointError that names two records which disagree.
    """
    _check_layout(manifest, driver)
    _check_driver(manifest, driver, followed)
    _check_prompts(plan, directory, driver, recorded)
    for group, ranks in manifest.groups.items():
        _check_trainer(plan, directory / group, ranks, driver)


def _check_layout(manifest: Manifest, driver: Mapping[str, Any]) -> None:
    """A reader of shards takes every file of a folder, so there must be none but those of a checkpoint."""
    listed = {entry.path for entry in manifest.files}
    due = {"driver.json", DRIVER_STATE, ROLLOUT_STATE}
    due |= {f"pending/batch_{number:03d}.safetensors" for number in range(len(driver["pending"]))}
    for group, ranks in manifest.groups.items():
        due |= {f"{group}/{name}" for name in ("args.json", "trainer.json", *(f"rank_{r}.json" for r in range(ranks)))}
    if missing := sorted(due - listed):
        raise CheckpointError(f"manifest.json lists no {missing[0]}, which a checkpoint of these groups has")
    shards = {path for path in listed for group in manifest.groups if _SHARD.fullmatch(path.removeprefix(f"{group}/"))}
    if strange := sorted(listed - due - shards):
        raise CheckpointError(f"manifest.json lists {short_repr(strange[0])}, which no checkpoint has; it is not read")


def _check_driver(manifest: Manifest, driver: Mapping[str, Any], followed: Collection[Alarm]) -> None:
    counters, observers = manifest.counters, driver["observers"]
    if manifest.policy_version != counters["global_step"]:
        raise _apart("driver.json", f"policy version {manifest.policy_version}", f"{counters['global_step']} steps")
    if observers["skips"]["in_a_row"]:
        raise _apart("driver.json", "skips.in_a_row", "a cycle that is committed, after which there are none")
    alarms, best = observers["alarms"], observers["best"]
    if strange := sorted(set(alarms["ringing"]) - {alarm.name for alarm in followed}):
        raise CheckpointError(
            f"driver.json lets an alarm {short_repr(strange[0])} ring, and there is none of that name"
        )
    if apart := sorted(alarms["series"].keys() ^ {alarm.series for alarm in followed if alarm.series}):
        raise CheckpointError(
            f"driver.json records other metrics for alarms than this run follows: {short_repr(apart[0])}"
        )
    longest = max((len(values) for values in alarms["series"].values()), default=0)
    if longest > manifest.cycle:
        raise _apart("driver.json", f"alarms.series of {longest} cycles", f"{manifest.cycle} that are committed")
    if len(best["values"]) > counters["global_step"]:
        raise _apart("driver.json", f"best.values of {len(best['values'])} steps", f"{counters['global_step']} in all")
    if best["best"] and (
        best["best"]["metric"] != best["metric"] or best["best"]["global_step"] > counters["global_step"]
    ):
        raise _apart("driver.json", "best.best", "its metric or the steps that were taken")


def _check_prompts(
    plan: DistillationPlan, directory: Path, driver: Mapping[str, Any], recorded: Mapping[str, Mapping[str, Any]]
) -> None:
    """The cursor follows from the batches that were drawn, those from the cycles, and samples that wait end at it."""
    cursor, draws, skips = driver["prompts"]["cursor"], driver["observers"]["draws"], driver["observers"]["skips"]
    if cursor != draws["since"] + draws["batches"] * draws["size"]:
        raise _apart("driver.json", f"prompts.cursor {cursor}", f"draws {json.dumps(draws)}")
    sizes = {content["arguments"].get("rollout_batch_size") for content in recorded.values()}
    if sizes != {draws["size"]}:
        raise _apart("driver.json", f"draws.size {draws['size']}", f"rollout_batch_size {sorted(map(str, sizes))}")
    cycles = driver["counters"]["completed_cycles"]
    schedule = plan.update_schedule
    # a cycle that was given up has used some of its batches
    least, most = skips["total"], skips["total"] * max(map(fresh_batches, (schedule.warmup_phases, schedule.phases)))
    known = schedule.fresh_batches_after(cycles) + len(driver["pending"])
    if draws["since"] == 0 and not known + least <= draws["batches"] <= known + most:
        raise _apart("driver.json", f"draws.batches {draws['batches']}", f"{cycles} cycles, which take {known}")
    _check_waiting(directory / "pending", driver["pending"], cursor)


def _check_waiting(folder: Path, rows: Iterable[Mapping[str, Any]], cursor: int) -> None:
    ids: list[Any] = []
    for number, row in enumerate(rows):
        path = folder / f"batch_{number:03d}.safetensors"
        numbers = read_header(path).numbers("batch")
        own = numbers.get("ids")
        if not isinstance(own, list) or len(own) != row["samples"]:
            raise _apart("driver.json", f"pending batch {number} of {row['samples']} samples", str(path.name))
        if numbers.get("policy_version") != row["policy_version"]:
            raise _apart(
                path.name, f"policy version {short_repr(numbers.get('policy_version'))}", "that of driver.json"
            )
        ids += own
    if ids != list(range(max(cursor - len(ids), 0), cursor)):
        raise _apart("driver.json", f"prompts.cursor {cursor}", "the samples that wait, which end elsewhere")


def _check_trainer(plan: DistillationPlan, folder: Path, ranks: int, driver: Mapping[str, Any]) -> None:
    numbers, file = read_trainer(folder), f"{folder.name}/trainer.json"
    if numbers["ranks"] != ranks:
        raise _apart(file, f"ranks {numbers['ranks']}", f"{ranks} of manifest.json")
    trained = plan.trainable_roles_of(folder.name)
    if apart := sorted(numbers["roles"].keys() ^ set(trained)):
        raise _apart(file, f"trained roles {sorted(numbers['roles'])}", f"the plan's, {apart[0]} being in one only")
    for role in trained:
        _check_steps(plan, role, file, numbers["roles"][role], driver)
    _check_tensors(folder, file, numbers["roles"])


def _check_steps(
    plan: DistillationPlan, role: str, file: str, numbers: Mapping[str, Any], driver: Mapping[str, Any]
) -> None:
    due = driver["counters"]["optimizer_steps"].get(role, 0)
    # the fake score keeps the steps of a cycle that was given up
    phases = (*plan.update_schedule.warmup_phases, *plan.update_schedule.phases)
    stray = driver["observers"]["skips"]["total"] * sum(p.repeats for p in phases if role in p.trainable_roles)
    steps, taken = numbers["scheduler_steps"], numbers["optimizer_steps"]
    if not due <= steps <= due + stray:
        raise _apart(file, f"scheduler_steps {steps}", f"{due} optimizer steps of manifest.json")
    if max(taken.values(), default=0) != steps:
        raise _apart(file, f"optimizer_steps of at most {max(taken.values(), default=0)}", f"scheduler_steps {steps}")
    if numbers["average_steps"] not in (None, steps):
        raise _apart(file, f"average_steps {numbers['average_steps']}", f"scheduler_steps {steps}")


def _check_tensors(folder: Path, file: str, roles: Mapping[str, Mapping[str, Any]]) -> None:
    """Moments that a record does not speak of would begin at zero, without a word."""
    due = {f"{role}.{name}" for role, numbers in roles.items() for name in _tensors(file, numbers)}
    found = {name for path in sorted(folder.glob("shard-*.safetensors")) for name in read_header(path).names}
    if apart := sorted(due ^ found):
        has = "has" if apart[0] in found else "lacks"
        raise _apart(file, "which names other tensors", f"its shards, of which one {has} {short_repr(apart[0])}")


def _tensors(file: str, numbers: Mapping[str, Any]) -> set[str]:
    """Names of the tensors of one trained role."""
    parameters, taken = numbers["parameters"], numbers["optimizer_steps"]
    if len(set(parameters)) != len(parameters):
        raise CheckpointError(f"{file} names a parameter twice")
    averaged = parameters if numbers["average_steps"] is not None else []
    names = {f"network.{name}" for name in parameters} | {f"average.{name}" for name in averaged}
    return names | {f"{moment}.{name}" for name in taken for moment in MOMENTS}


def _apart(file: str, one: str, other: str) -> CheckpointError:
    return CheckpointError(f"{file} contradicts another record: {one} does not go with {other}; it is not loaded")
