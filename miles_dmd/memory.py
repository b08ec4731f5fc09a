"""Memory estimate of each process, from weight headers or configurations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from miles_dmd import registry
from miles_dmd.config.args import Args
from miles_dmd.config.checkpoints import read_json, safetensors_parameters
from miles_dmd.config.networks import lacking
from miles_dmd.contracts.family import ModelFamily
from miles_dmd.plan import DistillationPlan

MASTER, GRADIENT, MOMENTS, AVERAGE = 4, 4, 8, 4
"""Bytes a parameter: fp32 weights and gradients, AdamW's two fp32 moments, the fp32 moving average."""
COMPUTE = {"fp32": 0, "bf16": 2}
"""Bytes a parameter of the copy that forward and backward compute with, where it is not the master itself."""


def memory(args: Args, plan: DistillationPlan, trainers: Mapping[str, Args]) -> tuple[list[tuple[str, ...]], str]:
    """Rows of a table, the first its header, and a note. ``trainers``: group -> its own arguments."""
    rows: list[tuple[str, ...]] = [
        ("", "role", "parameters", "weights", "gradients", "AdamW", "compute copy", "tables", "per rank")
    ]
    for group, own in trainers.items():
        total = 0.0
        for role, number, bytes_each, tables in _held(plan, group, own):
            total += number * sum(bytes_each) / own.num_trainer_ranks + tables
            sizes = (*(_size(number * each) for each in bytes_each), _size(tables))
            rows.append((group, role, f"{number:,}", *sizes, ""))
        rows[-1] = (*rows[-1][:-1], _size(total))
    student = trainers[plan.group_of("student")]
    number = _parameters(student, student.hf_checkpoint or "")
    sampling, tables = number * (COMPUTE[student.compute_dtype] or MASTER), _tables(student)
    sizes = (_size(sampling), "-", "-", "-", _size(tables), _size(sampling + tables))
    rows.append(("rollout", "student", f"{number:,}", *sizes))
    note = (
        "an estimate: without activations, gathered blocks, text encoders and VAE\n"
        "  tables: fixed values that come with the network, such as positions; every rank holds them whole"
    )
    if args.sample_prompts:
        note += "\n  rollout holds the teacher, too, while it draws the first grid of samples"
    return rows, note + _without_weights(args, trainers)


def _held(plan: DistillationPlan, group: str, own: Args) -> Iterator[tuple[str, int, tuple[int, int, int, int], int]]:
    """(logical role, its parameters, bytes of weights, gradients, moments and compute copy for each of them, bytes of
    its buffers)."""
    checkpoints = registry.load("roles", group).pipelines
    fresh = registry.load("losses", own.loss_type).modules
    trained = plan.trainable_roles_of(group)
    for role in plan.roles_of(group):
        if role in fresh:
            continue  # known when it is built, and small beside a network
        if role in checkpoints:
            number = _parameters(own, getattr(own, checkpoints[role]))
            copy = COMPUTE[own.compute_dtype]
            sizes = (MASTER, GRADIENT, MOMENTS, copy) if role in trained else (MASTER, 0, 0, copy)
            yield role, number, sizes, _tables(own)
        elif plan.averaged_role is not None:
            yield role, _parameters(own, getattr(own, checkpoints[plan.averaged_role])), (AVERAGE, 0, 0, 0), 0


def _tables(args: Args) -> int:
    """Bytes of the network's buffers, such as a table of positions: every rank holds them whole."""
    family: ModelFamily = registry.load("models", args.model_family)
    return family.buffer_bytes(read_json(Path(args.hf_checkpoint or "") / family.network_component / "config.json"))


def _parameters(args: Args, checkpoint: str) -> int:
    """Of the network that is distilled: from its weights' headers, or where there are none from its config.json."""
    family: ModelFamily = registry.load("models", args.model_family)
    directory = Path(checkpoint) / family.network_component
    found = safetensors_parameters(directory, family.saved_buffers)
    return found or family.count_parameters(read_json(directory / "config.json"))


def _without_weights(args: Args, trainers: Mapping[str, Args]) -> str:
    """A line for each checkpoint that the run itself would refuse, because of it only the configuration is there."""
    paths = {args.hf_checkpoint or "", *(own.hf_checkpoint or "" for own in trainers.values()), args.teacher_path or ""}
    family: ModelFamily = registry.load("models", args.model_family)
    lines = ""
    for path in sorted(paths):
        if missing := lacking(Path(path), family):
            lines += (
                f"\n  {path} lacks the files of {', '.join(missing)}: counted from its configuration, and a run "
                "refuses it until they are there"
            )
    return lines


def _size(amount: float) -> str:
    """Bytes, in the unit that leaves a number to read."""
    if amount == 0:
        return "-"
    unit, name = next((u, n) for u, n in ((2**30, "GiB"), (2**20, "MiB"), (0, "KiB")) if amount >= u)
    return f"{amount / (unit or 2**10):,.1f} {name}"
