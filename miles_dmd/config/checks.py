"""Rules between arguments, and what they need on disk; one small function each, before anything starts."""

import logging
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from miles_dmd import prompts, registry
from miles_dmd.config.args import Args
from miles_dmd.config.idle import check_idle
from miles_dmd.config.metric_names import metric_names
from miles_dmd.config.networks import check_pipeline, distilled, require_alike
from miles_dmd.config.overrides import check_read, check_run_wide
from miles_dmd.config.places import check_device, check_interfaces, check_places, check_ray_address
from miles_dmd.config.plan_rules import check_models, check_plan_is_obeyed
from miles_dmd.config.plugins import (
    check_engine_options,
    check_loss_options,
    check_loss_parts,
    check_plan,
    check_plugins,
    check_teacher_sampling,
)
from miles_dmd.config.presets import shipped
from miles_dmd.config.prompt_table import check_room
from miles_dmd.config.resume import open_resume
from miles_dmd.config.runs import check_save
from miles_dmd.config.trainers import student_args, trainer_args
from miles_dmd.config.values import flag_name, kinds
from miles_dmd.errors import ConfigError
from miles_dmd.files import digests
from miles_dmd.observe.trackers import check_installed
from miles_dmd.registry import nearest
from miles_dmd.shown import shown

logger = logging.getLogger(__name__)


def check_args(args: Args) -> None:
    """Raises ConfigError, one line, for the first rule that is broken. Writes nothing, imports no torch."""
    if not isinstance(args, Args):
        raise ConfigError(f"a run is asked for by miles_dmd.config.args.Args, not by {shown(args)}; see parse_args")
    for rule in RULES:
        try:
            rule(args)
        except OSError as error:
            raise ConfigError(f"{_who_named(error.filename, args)}: {error.strerror}; name another") from error


def check_required(args: Args) -> None:
    missing = [flag_name(name) for name in ("hf_checkpoint", "prompt_data") if getattr(args, name) is None]
    if missing:
        preset = "" if args.config or not shipped() else f"; or start from a preset: --config {shipped()[0]}"
        raise ConfigError(
            f"--loss-type {args.loss_type} needs {' and '.join(missing)} (a pipeline directory to start from, a file "
            f"of prompts){preset}"
        )


def check_one_step_a_phase(args: Args) -> None:
    """A second step would train on scores of a student that no longer exists, and a phase reports exactly one."""
    for role, own in _trainers(args):
        if own.num_steps_per_rollout != 1:
            raise ConfigError(
                f"{_flag(args, role, 'num_steps_per_rollout')} {own.num_steps_per_rollout} must be 1 for the {role}: a "
                "phase is one optimizer step, and scores of the student's samples hold for one only"
            )


def check_batch_divides(args: Args) -> None:
    ranks = {role: own.num_trainer_ranks for role, own in _trainers(args)}
    size, step = args.rollout_batch_size, math.lcm(*ranks.values())
    if size % step:
        below, above = size // step * step, (size // step + 1) * step
        closest = above if not below or above - size < size - below else below
        who = next(role for role, count in ranks.items() if size % count)
        raise ConfigError(
            f"--rollout-batch-size {size} must divide by the ranks of every trainer, and the {who} has {ranks[who]} "
            f"({_flag(args, who, 'num_trainer_ranks')}); the nearest that does is {closest}"
        )


def check_local(args: Args) -> None:
    if not args.local:
        return
    for role, own in _trainers(args):
        if own.num_trainer_ranks != 1:
            raise ConfigError(
                f"{_flag(args, role, 'num_trainer_ranks')} {own.num_trainer_ranks} needs processes of its own, and "
                "--local runs everything in this one; drop one of the two"
            )


def check_warmup(args: Args) -> None:
    """A warm-up as long as the run never gets to the learning rate that was asked for."""
    plan = registry.load("losses", args.loss_type).plan(args)
    steps = plan.optimizer_steps(args.num_rollout)
    for role, own in _trainers(args):
        own_steps = min((steps[name] for name in plan.trainable_roles_of(role)), default=0)
        if own_steps and own.lr_warmup_steps >= own_steps:
            raise ConfigError(
                f"{_flag(args, role, 'lr_warmup_steps')} {own.lr_warmup_steps}: the {role} takes {own_steps} steps in "
                f"this run and would never reach its learning rate; name fewer, or lengthen the run"
            )


def check_checkpoints(args: Args) -> None:
    first: tuple[str, Path] | None = None
    for flag, path, own in _checkpoints(args):
        family = registry.load("models", own.model_family)
        try:
            check_pipeline(path, family, weights=not args.dry_run)
            first = first or (flag, path)
            require_alike(family, path, *first, known=digests(args.cache_dir))
        except ConfigError as error:
            raise ConfigError(f"{flag} {path}: {error}") from error
        except OSError as error:
            raise ConfigError(f"{flag} {path}: {error.filename} cannot be read ({error.strerror})") from error


def check_teacher(args: Args) -> None:
    """Say so, and go on: a student may be distilled again, into fewer steps."""
    teacher = Path(args.teacher_path or "")
    if why := distilled(teacher):
        logger.warning(
            "%s %s: the teacher is a distilled student itself (%s); at other noise levels and guidance than its own it "
            "is poor, so name the model that it came from by --teacher-checkpoint",
            _flag_of_teacher(args), teacher, why,
        )  # fmt: skip


def check_pixels(args: Args) -> None:
    family = registry.load("models", args.model_family)
    sides = zip(
        ("--height", "--width"),
        (args.height, args.width),
        family.default_pixels(Path(student_args(args, registry.load("losses", args.loss_type)).hf_checkpoint or "")),
        strict=True,
    )
    for flag, asked, default in sides:
        pixels = asked or default
        for _, checkpoint, _ in _checkpoints(args):
            step, longest = family.pixel_multiple(checkpoint), family.max_pixels(checkpoint)
            if pixels % step:
                nearest = max(round(pixels / step), 1) * step
                raise ConfigError(
                    f"{flag} {pixels} must be a multiple of {step} for {checkpoint}; the nearest is {nearest}"
                )
            if pixels > longest:
                raise ConfigError(f"{flag} {pixels} is more than {checkpoint} has positions for; at most {longest}")


def check_trackers(args: Args) -> None:
    check_installed(tensorboard=args.tensorboard, wandb_project=args.wandb_project)


def check_text_length(args: Args) -> None:
    longest = registry.load("models", args.model_family).longest_text
    if args.max_sequence_length is not None and args.max_sequence_length > longest:
        raise ConfigError(
            f"--max-sequence-length {args.max_sequence_length} is more than the stock pipeline takes; at most {longest}"
        )


def check_prompts(args: Args) -> None:
    prompts.read_prompts(args.prompt_data or "")


def check_load(args: Args) -> None:
    for trainer in args.trainers:
        if "load" in trainer.overrides:
            flag = flag_name("load", trainer.role)
            raise ConfigError(
                f"{flag} {trainer.overrides['load']}: a checkpoint holds all trainers of a run; load them by --load"
            )
    if args.allow_changed and args.load is None:
        raise ConfigError(f"--allow-changed {' '.join(args.allow_changed)} speaks of a checkpoint; name it by --load")
    open_resume(args)


def check_keep_best(args: Args) -> None:
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
    if metric not in (known := metric_names(args)):
        raise ConfigError(
            f"--keep-best {args.keep_best}: no cycle of this run has a number {metric!r}{nearest(metric, known)}; "
            "docs/metrics.md lists them, and a loss type of your own declares its own in its metrics"
        )


RULES: tuple[Callable[[Args], None], ...] = (
    check_required,
    check_run_wide,
    check_plugins,
    check_loss_options,
    check_plan,
    check_loss_parts,
    check_plan_is_obeyed,
    check_teacher_sampling,
    check_read,
    check_one_step_a_phase,
    check_batch_divides,
    check_local,
    check_idle,
    check_warmup,
    check_places,
    check_device,
    check_interfaces,
    check_ray_address,
    check_checkpoints,
    check_models,
    check_teacher,
    check_pixels,
    check_text_length,
    check_trackers,
    check_prompts,
    check_room,
    check_engine_options,
    check_load,
    check_save,
    check_keep_best,
)
"""In order: what comes first makes sense of what comes after."""


def _trainers(args: Args) -> Iterator[tuple[str, Args]]:
    yield from trainer_args(args).items()


def _checkpoints(args: Args) -> Iterator[tuple[str, Path, Args]]:
    """(flag, directory, arguments of the trainer) of every network that some trainer starts from."""
    for role, own in _trainers(args):
        for argument in dict.fromkeys(registry.load("roles", role).pipelines.values()):
            flag = _flag(args, role, argument) if argument in kinds(Args) else _flag_of_teacher(args)
            yield flag, Path(getattr(own, argument)), own


def _flag(args: Args, role: str, argument: str) -> str:
    """The flag that gave this trainer its value."""
    own = {trainer.role: trainer.overrides for trainer in args.trainers}.get(role, {})
    return flag_name(argument, role if argument in own else "")


def _flag_of_teacher(args: Args) -> str:
    """The flag that named it: teacher_path is one of two."""
    return flag_name("teacher_checkpoint" if args.teacher_checkpoint else "hf_checkpoint")


def _who_named(path: Any, args: Args) -> str:
    """The flag of a path that could not be looked at, and the path."""
    if path is None:
        return "the current directory"
    place = Path(os.path.abspath(path))
    within = [(flag, root) for flag, root in _paths(args) if place.is_relative_to(root)]
    flag = max(within, key=lambda found: len(found[1].parts))[0] if within else ""  # the nearest folder is meant
    return f"{flag} {path}".strip()


def _paths(args: Args) -> Iterator[tuple[str, Path]]:
    """(flag, path) of everything that an argument names."""
    owners = [("", args), ("", args.loss_options), ("", args.engine_options)]
    for role, holder in owners:
        for name, kind in kinds(type(holder)).items():
            if kind.path is not None and isinstance(value := getattr(holder, name), str):
                yield flag_name(name, role), Path(os.path.abspath(value))
    for trainer in args.trainers:
        for name, value in trainer.overrides.items():
            if name in kinds(Args) and kinds(Args)[name].path is not None and isinstance(value, str):
                yield flag_name(name, trainer.role), Path(os.path.abspath(value))
