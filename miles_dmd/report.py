"""Tables of the resolved run, printed before a run or by --dry-run. Knows no torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from miles_dmd.config.args import Args
from miles_dmd.config.flags import per_trainer
from miles_dmd.config.values import kinds
from miles_dmd.memory import memory
from miles_dmd.observe.tables import Table
from miles_dmd.plan import UpdatePhaseSpec
from miles_dmd.plan.schedule import fresh_batches
from miles_dmd.preflight.resolved import ResolvedRun
from miles_dmd.preflight.run_directory import preset_name
from miles_dmd.sampling.partition import micro_batches, rows_of_rank

ALWAYS_SHOWN = ("lr",)


def run_tables(run: ResolvedRun) -> str:
    """All tables as text."""
    tables = (trainer_table, options_table, schedule_table, rollout_table, batch_table, placement_table, memory_table)
    return "\n\n".join(str(table(run)) for table in tables)


def unchecked(run: ResolvedRun) -> str:
    """A line on what a dry run leaves to the run itself."""
    left = ["GPUs were not counted"] if run.args.device != "cpu" else []
    if run.args.ray_address is not None:
        left.append(f"--ray-address {run.args.ray_address} was not asked")
    if any(map(run.family.lacking, run.directories)):
        left.append("weights that are missing were not read")
    return f"Not checked by --dry-run: {'; '.join([*left, 'whether the networks can be built, and memory suffices'])}"


def _own_options(options: Any) -> list[tuple[str, str]]:
    return [(name, _value_text(getattr(options, name))) for name in kinds(type(options))]


def trainer_table(run: ResolvedRun) -> Table:
    """Table of trainers: roles held, trained and read; of the arguments, those that differ between trainers."""
    rows = [
        ("", *run.trainers),
        ("holds", *(_holds(run, group) for group in run.trainers)),
        ("trains", *(_trains(run, group) for group in run.trainers)),
        ("optimizer steps", *(_optimizer_steps(run, group) for group in run.trainers)),
    ]
    for name in per_trainer():
        values = [getattr(own, name) for own in run.trainers.values()]
        if name in ALWAYS_SHOWN or any(value != values[0] for value in values):
            rows.append((name, *map(_value_text, values)))
    return Table("Trainers", rows)


def options_table(run: ResolvedRun) -> Table:
    """The loss type's options, each as the groups that read it have it; alarms are of the run's watch, not of this."""
    alarms = {alarm.option for alarm in run.alarms}
    rows = [(name, _option(name, run)) for name in kinds(run.loss_type.options) if name not in alarms]
    return Table(f"Loss type {run.args.loss_type}", rows or [("no options", "")])


def _option(name: str, run: ResolvedRun) -> str:
    """``3``, or ``critic 3, actor 1`` where trainers differ."""
    readers = run.loss_type.trainers_of(name) or tuple(run.trainers)
    values = {group: _value_text(getattr(run.trainers[group].loss_options, name)) for group in readers}
    if len(set(values.values())) == 1:
        return next(iter(values.values()))
    return ", ".join(f"{group} {value}" for group, value in values.items())


def schedule_table(run: ResolvedRun) -> Table:
    schedule = run.plan.update_schedule
    rows = [("cycle", _then(schedule.phases))]
    if schedule.warmup_cycles:
        rows.append(("warm-up", f"{_counted(schedule.warmup_cycles, 'cycle')} of {_then(schedule.warmup_phases)}"))
    rows.append(("run", f"{_counted(run.args.num_rollout, 'cycle')}, one student step each"))
    return Table("Schedule", rows)


def rollout_table(run: ResolvedRun) -> Table:
    args = run.args
    return Table(
        "Rollout",
        [
            ("engine", args.rollout_engine),
            *_own_options(args.engine_options),
            *run.modality.rows(run),
            ("prompts", f"{len(run.prompts)} in {args.prompt_data}"),
            ("student", str(run.student.hf_checkpoint)),
            ("teacher", run.student.teacher_checkpoint or "held by servers"),
            *([("load", args.load)] if args.load else []),
            ("save", args.save or f"runs/{preset_name(args)}-<n>"),
        ],
    )


def batch_table(run: ResolvedRun) -> Table:
    """From the global batch down to what one forward sees, and up to what the run samples."""
    size = run.args.rollout_batch_size
    rows = [("", "batch", "ranks", "per rank", "micro-batches")]
    for group, own in run.trainers.items():
        share = len(rows_of_rank(size, 0, own.num_trainer_ranks))
        pieces = [len(piece) for piece in micro_batches(share, own.micro_batch_size)]
        rows.append((group, str(size), str(own.num_trainer_ranks), str(share), _pieces(pieces)))
    schedule = run.plan.update_schedule
    fresh = fresh_batches(schedule.phases)
    total = schedule.fresh_batches_after(schedule.warmup_cycles + run.args.num_rollout) * size
    note = f"{fresh} batch{'es' * (fresh != 1)} = {fresh * size:,} samples a cycle; {total:,} samples in the run"
    return Table("Batches", rows, note)


def placement_table(run: ResolvedRun) -> Table:
    if run.args.local:
        return Table("Placement", [("--local", f"everything in this process; {_devices(run.args, 1, 'this machine')}")])
    ranks = {group: own.num_trainer_ranks for group, own in run.trainers.items()}
    servers = run.engine.num_servers(run.args)
    rows = [("bundle", "a rank of each")]
    for bundle in _distinct_bundles(ranks):
        occupants = [group for group, count in ranks.items() if bundle[0] < count]
        name = str(bundle[0]) if len(bundle) == 1 else f"{bundle[0]}..{bundle[-1]}"
        rows.append((name, ", ".join([*occupants, *(["rollout"] if bundle[0] == 0 else [])])))
    if servers:
        rows.append(("all in turn", _counted(servers, "rollout server")))
    share = f"1/{len(ranks) + 1 + math.ceil(servers / max(ranks.values()))}"
    device = _devices(run.args, max(ranks.values()), "the cluster")
    return Table("Placement", rows, f"one device a bundle ({device}), {share} of it asked for by each occupant")


def _devices(args: Args, bundles: int, where: str) -> str:
    """Devices that the run computes on: --device auto takes CPUs only where there is no GPU at all."""
    if args.device != "auto":
        return args.device
    if bundles == 1:
        return f"a GPU where {where} has one, else the CPU"
    return f"CPUs where {where} has no GPU; else GPUs, and with fewer than {bundles} of them the run is refused"


def memory_table(run: ResolvedRun) -> Table:
    rows, note = memory(run)
    return Table("Memory", rows, note)


def _holds(run: ResolvedRun, group: str) -> str:
    return ", ".join(run.plan.roles_of(group))


def _trains(run: ResolvedRun, group: str) -> str:
    return ", ".join(run.plan.trainable_roles_of(group)) or "nothing"


def _optimizer_steps(run: ResolvedRun, group: str) -> str:
    steps = run.plan.optimizer_steps(run.args.num_rollout)
    return ", ".join(f"{steps[role]:,}" for role in run.plan.trainable_roles_of(group)) or "none"


def _then(phases: Iterable[UpdatePhaseSpec]) -> str:
    """``1 student step, then 5 fake-score steps``."""
    return ", then ".join(_counted(phase.repeats, f"{' + '.join(phase.trainable_roles)} step") for phase in phases)


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _pieces(sizes: Sequence[int]) -> str:
    """``3 x 8 + 4``: all alike but perhaps the last."""
    whole = sum(size == sizes[0] for size in sizes)
    return f"{whole} x {sizes[0]}" + (f" + {sizes[-1]}" if whole < len(sizes) else "")


def _distinct_bundles(ranks: Mapping[str, int]) -> Iterator[range]:
    """Runs of bundles with the same occupants; the first is by itself, because the rollout worker sits there."""
    edges = sorted({0, 1, *ranks.values()})
    for start, stop in itertools.pairwise(edges):
        yield range(start, stop)


def _value_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return " ".join(map(_value_text, value))
    return f"{value:g}" if isinstance(value, float) and math.isfinite(value) else str(value)
