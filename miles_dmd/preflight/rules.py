"""Rules between arguments, and what they need on disk; one small function each, before anything starts."""

import contextlib
import dataclasses
import logging
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from miles_dmd import registry
from miles_dmd.config import idle
from miles_dmd.config.args import Args
from miles_dmd.config.presets import read_preset, shipped
from miles_dmd.config.trainers import trainer_args
from miles_dmd.config.values import flag_name, kinds
from miles_dmd.errors import ConfigError
from miles_dmd.files import digests
from miles_dmd.observe.trackers import check_installed
from miles_dmd.preflight.hooks import PREFIX, check_hooks
from miles_dmd.preflight.metric_names import metric_names
from miles_dmd.preflight.overrides import check_read, check_run_wide
from miles_dmd.preflight.places import check_device, check_interfaces, check_places, check_ray_address
from miles_dmd.preflight.plan_rules import check_models, check_plan_is_obeyed
from miles_dmd.preflight.plugins import (
    check_engine_options,
    check_loss_options,
    check_loss_parts,
    check_modality,
    check_options,
    plan_of,
)
from miles_dmd.preflight.resolved import ResolvedRun
from miles_dmd.preflight.resume import open_resume
from miles_dmd.preflight.run_directory import check_save, inputs
from miles_dmd.registry import nearest
from miles_dmd.shown import short_repr

logger = logging.getLogger(__name__)
NO_MEMORY = "there is no memory left to read it; raise `ulimit -v`, or end what else uses memory"


def resolve(args: Args) -> ResolvedRun:
    """The run that ``args`` ask for, checked. Writes nothing, imports no torch.

    Raises ConfigError, one line, for the first rule that is broken.
    """
    if not isinstance(args, Args):
        raise ConfigError(
            f"a run is asked for by miles_dmd.config.args.Args, not by {short_repr(args)}; see parse_args"
        )
    with _naming_flags(args):
        run = _looked_up(args)
        for rule in RULES:
            rule(run)
        run = dataclasses.replace(run, resume=open_resume(run))
        check_save(args)
        check_keep_best(run)
    return run


def _looked_up(args: Args) -> ResolvedRun:
    """The run, of which only what its plan needs has been checked."""
    check_required(args)
    loss_type, family = registry.load("losses", args.loss_type), registry.load("models", args.model_family)
    modality = registry.load("modalities", loss_type.modality)
    check_run_wide(args, loss_type, modality)
    trainers = trainer_args(args)
    engine = registry.load("engines", args.rollout_engine)
    roles = {group: registry.load("roles", group) for group in trainers}
    check_modality(args, loss_type, family, engine)
    check_loss_options(args, trainers, loss_type)
    plan = plan_of(args, loss_type)
    return ResolvedRun(args, trainers, loss_type, modality, family, engine, roles, plan)


@contextlib.contextmanager
def _naming_flags(args: Args) -> Iterator[None]:
    """A file that cannot be looked at is told of with the flag that named it."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{_flag_and_path(error.filename, args)}: {error.strerror}; name another") from error
    except MemoryError as error:
        raise ConfigError(f"{' '.join(_read_flags(args))}: {NO_MEMORY}") from error


def check_required(args: Args) -> None:
    missing = [flag_name(name) for name in ("hf_checkpoint", "prompt_data") if getattr(args, name) is None]
    if missing:
        presets = [name for name in shipped() if read_preset(name).args.get("loss_type") == args.loss_type]
        preset = "" if args.config or not presets else f"; or start from a preset: --config {presets[0]}"
        raise ConfigError(
            f"--loss-type {args.loss_type} needs {' and '.join(missing)} (a model directory to start from, a file of "
            f"prompts){preset}"
        )


def check_batch_divides(run: ResolvedRun) -> None:
    ranks = {role: own.num_trainer_ranks for role, own in run.trainers.items()}
    size, step = run.args.rollout_batch_size, math.lcm(*ranks.values())
    if size % step:
        below, above = size // step * step, (size // step + 1) * step
        closest = above if not below or above - size < size - below else below
        who = next(role for role, count in ranks.items() if size % count)
        raise ConfigError(
            f"--rollout-batch-size {size} must divide by the ranks of every trainer, and the {who} has {ranks[who]} "
            f"({run.flag(who, 'num_trainer_ranks')}); the nearest that does is {closest}"
        )


def check_local(run: ResolvedRun) -> None:
    if not run.args.local:
        return
    for role, own in run.trainers.items():
        if own.num_trainer_ranks != 1:
            raise ConfigError(
                f"{run.flag(role, 'num_trainer_ranks')} {own.num_trainer_ranks} needs processes of its own, and "
                "--local runs everything in this one; drop one of the two"
            )


def check_warmup(run: ResolvedRun) -> None:
    """A warm-up as long as the run never gets to the learning rate that was asked for."""
    for role, own in run.trainers.items():
        own_steps = min((run.horizons[name] for name in run.plan.trainable_roles_of(role)), default=0)
        if own_steps and own.lr_warmup_steps >= own_steps:
            raise ConfigError(
                f"{run.flag(role, 'lr_warmup_steps')} {own.lr_warmup_steps}: the {role} takes {own_steps} steps in "
                f"this run and would never reach its learning rate; name fewer, or lengthen the run"
            )


def check_models_on_disk(run: ResolvedRun) -> None:
    """Whole model directories, which share what the networks of a run must share."""
    first: tuple[str, Path] | None = None
    for path, flag in run.directories.items():
        try:
            run.family.require(path, weights=not run.args.dry_run)
            first = first or (flag, path)
            run.family.require_alike(path, *first, known=digests(run.args.cache_dir))
        except ConfigError as error:
            raise ConfigError(f"{flag} {path}: {error}") from error
        except MemoryError as error:
            raise ConfigError(f"{flag} {path}: {NO_MEMORY}") from error
        except OSError as error:
            raise ConfigError(f"{flag} {path}: {error.filename} cannot be read ({error.strerror})") from error


def check_teacher(run: ResolvedRun) -> None:
    """Warn, and go on: a student may be distilled again, into fewer steps."""
    teacher = run.student.teacher_checkpoint  # None where servers hold it
    if teacher is not None and (why := run.family.distilled(Path(teacher))):
        logger.warning(
            "%s %s: the teacher is a distilled student itself (%s), and poor where it was not trained; name the model "
            "that it came from by --teacher-checkpoint",
            run.flag_of_teacher, teacher, why,
        )  # fmt: skip


def check_trackers(run: ResolvedRun) -> None:
    check_installed(tensorboard=run.args.tensorboard, wandb_project=run.args.wandb_project)


def check_prompts(run: ResolvedRun) -> None:
    assert run.prompts  # which are read here for the first time


def check_load(run: ResolvedRun) -> None:
    args = run.args
    if args.allow_changed and args.load is None:
        raise ConfigError(f"--allow-changed {' '.join(args.allow_changed)} requires --load CHECKPOINT")


def check_keep_best(run: ResolvedRun) -> None:
    args = run.args
    if args.keep_best is None:
        return
    way, _, metric = args.keep_best.partition(":")
    if way not in ("min", "max") or not metric:
        raise ConfigError(
            f"--keep-best {args.keep_best} must be min:NAME or max:NAME, for instance max:samples/diversity"
        )
    if metric.startswith("samples/") and args.sample_prompts == 0:
        raise ConfigError(
            f"--keep-best {args.keep_best} is measured on the grids of samples, and --sample-prompts 0 asks for none; "
            "drop one of the two"
        )
    if args.hook and metric.startswith(PREFIX):  # known once it reports
        return
    if metric not in (known := metric_names(run)):
        raise ConfigError(
            f"--keep-best {args.keep_best}: no cycle of this run has a number {metric!r}{nearest(metric, known)}; "
            "docs/metrics.md lists them, and a loss type of your own declares its own in its metrics"
        )


def check_idle(run: ResolvedRun) -> None:
    idle.check_idle(run.args)


RULES: tuple[Callable[[ResolvedRun], None], ...] = (
    check_loss_parts,
    check_plan_is_obeyed,
    check_read,
    check_batch_divides,
    check_local,
    check_idle,
    check_warmup,
    check_places,
    check_device,
    check_interfaces,
    check_ray_address,
    check_models_on_disk,
    check_models,
    check_teacher,
    check_trackers,
    check_prompts,
    check_options,
    check_hooks,
    check_engine_options,
    check_load,
)
"""In order: what comes first makes sense of what comes after."""


def _flag_and_path(path: Any, args: Args) -> str:
    """A path that could not be looked at, after the flag that named it or a folder above it."""
    if path is None:
        return "the current directory"
    place = Path(os.path.abspath(path))
    within = [(flag, root) for flag, root in _paths(args) if place.is_relative_to(root)]
    flag = max(within, key=lambda found: len(found[1].parts))[0] if within else ""  # the nearest folder is meant
    return f"{flag} {path}".strip()


def _read_flags(args: Args) -> Iterator[str]:
    """Flags that name what a run reads, with their values."""
    return (f"{flag} {path}" for flag, path in inputs(args))


def _paths(args: Args) -> Iterator[tuple[str, Path]]:
    """(flag, path) of everything that an argument names."""
    owners = [("", args), ("", args.loss_options), ("", args.engine_options), ("", args.modality_options)]
    for role, holder in owners:
        for name, kind in kinds(type(holder)).items():
            if kind.path is not None and isinstance(value := getattr(holder, name), str):
                yield flag_name(name, role), Path(os.path.abspath(value))
    for trainer in args.trainers:
        for name, value in trainer.overrides.items():
            if name in kinds(Args) and kinds(Args)[name].path is not None and isinstance(value, str):
                yield flag_name(name, trainer.role), Path(os.path.abspath(value))
