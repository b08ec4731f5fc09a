"""Memory estimate of each process, from weight headers or configurations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from miles_dmd.config.args import Args
from miles_dmd.contracts.family import ModelFamily
from miles_dmd.pipelines.documents import read_json
from miles_dmd.pipelines.weights import safetensors_parameters
from miles_dmd.preflight.resolved import ResolvedRun
from miles_dmd.shown import byte_size

MASTER, GRADIENT, MOMENTS, AVERAGE = 4, 4, 8, 4
"""Bytes a parameter: fp32 weights and gradients, AdamW's two fp32 moments, the fp32 moving average."""
COMPUTE = {"fp32": 0, "bf16": 2}
"""Bytes a parameter of the copy that forward and backward compute with, where it is not the master itself."""


def memory(run: ResolvedRun) -> tuple[list[tuple[str, ...]], str]:
    """Rows of a table, the first its header, and a note."""
    rows: list[tuple[str, ...]] = [
        ("", "role", "parameters", "weights", "gradients", "AdamW", "compute copy", "tables", "per rank")
    ]
    for group, own in run.trainers.items():
        total = 0.0
        for role, number, bytes_each, tables in _held(run, group, own):
            total += number * sum(bytes_each) / own.num_trainer_ranks + tables
            sizes = (*(_size(number * each) for each in bytes_each), _size(tables))
            rows.append((group, role, f"{number:,}", *sizes, ""))
        if total:
            rows[-1] = (*rows[-1][:-1], _size(total))
    student = run.student
    number = _parameters(run.family, student.hf_checkpoint or "")
    sampling, tables = number * (COMPUTE[student.compute_dtype] or MASTER), _tables(run.family, student)
    sizes = (_size(sampling), "-", "-", "-", _size(tables), _size(sampling + tables))
    rows.append(("rollout", "student", f"{number:,}", *sizes))
    note = (
        f"an estimate: without activations, gathered blocks, {run.modality.not_counted}\n"
        "  tables: fixed values that come with the network, such as positions; every rank holds them whole"
    )
    if run.args.sample_prompts and run.teacher_sampling:
        note += "\n  rollout holds the teacher, too, while it draws its first samples"
    return rows, note + _without_weights(run)


def _held(run: ResolvedRun, group: str, own: Args) -> Iterator[tuple[str, int, tuple[int, int, int, int], int]]:
    """(logical role, its parameters, bytes of weights, gradients, moments and compute copy for each of them, bytes of
    its buffers)."""
    plan, checkpoints, fresh = run.plan, run.roles[group].pipelines, run.loss_type.modules
    trained = plan.trainable_roles_of(group)
    for role in plan.roles_of(group):
        if role in fresh:
            continue  # known when it is built, and small beside a network
        if role in checkpoints and getattr(own, checkpoints[role]) is None:
            continue  # a server holds it
        if role in checkpoints:
            number = _parameters(run.family, getattr(own, checkpoints[role]))
            copy = COMPUTE[own.compute_dtype]
            sizes = (MASTER, GRADIENT, MOMENTS, copy) if role in trained else (MASTER, 0, 0, copy)
            yield role, number, sizes, _tables(run.family, own)
        elif plan.averaged_role is not None:
            yield role, _parameters(run.family, getattr(own, checkpoints[plan.averaged_role])), (AVERAGE, 0, 0, 0), 0


def _tables(family: ModelFamily, args: Args) -> int:
    """Bytes of the network's buffers, such as a table of positions: every rank holds them whole."""
    return family.buffer_bytes(read_json(args.pipeline_directory / family.network_component / "config.json"))


def _parameters(family: ModelFamily, pipeline: str) -> int:
    """Parameters of the network that is distilled, from its weights' headers, or without them from its config.json."""
    directory = Path(pipeline) / family.network_component
    found = safetensors_parameters(directory, family.saved_buffers)
    return found or family.count_parameters(Path(pipeline))


def _without_weights(run: ResolvedRun) -> str:
    """A line for each pipeline directory that a run would refuse, since it holds the configuration alone."""
    lines = ""
    for path in sorted(run.directories):
        if missing := run.family.lacking(path):
            lines += (
                f"\n  {path} lacks the files of {', '.join(missing)}: counted from its configuration, and a run "
                "refuses it until they are there"
            )
    return lines


def _size(amount: float) -> str:
    return byte_size(amount) if amount else "-"
