"""Arguments that nothing reads beside the others of their run: they would do nothing, and seem to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any

from miles_dmd import registry
from miles_dmd.config.alarms import alarm_thresholds
from miles_dmd.config.args import Args
from miles_dmd.config.flags import Given
from miles_dmd.config.trainers import compute_trainer_args, compute_trainer_configs
from miles_dmd.config.values import flag_name
from miles_dmd.errors import ConfigError

if TYPE_CHECKING:
    from miles_dmd.contracts.modality import Modality

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Unread:
    """``arguments`` have no effect on a run of which ``when`` holds, because of what ``why`` says."""

    arguments: tuple[str, ...]
    when: Callable[[Args], bool]
    why: str
    """With the flag that is the reason, and where there is one, the cure."""
    each_trainer: bool = False
    """True if a trainer may read its own of them."""


def _alarms(args: Args) -> bool:
    return any(threshold > 0 for threshold in alarm_thresholds(args).values())


UNREAD = (
    Unread(
        ("ray_address", "ray_auth_mode", "placement_timeout", "remote_timeout"),
        lambda args: args.local,
        "needs Ray, and --local runs everything in this process; drop one of the two",
    ),
    Unread(
        ("keep_checkpoints", "on_save_failure"),
        lambda args: args.save_interval == 0,
        "needs checkpoints, and --save-interval 0 writes none; drop one of the two",
    ),
    Unread(
        ("overwrite",),
        lambda args: args.save is None,
        "replaces the run that --save holds, and without --save a run has a fresh directory; name one, or drop it",
    ),
    Unread(
        ("sample_interval",),
        lambda args: args.sample_prompts == 0 and args.keep_best is None,
        "needs grids of samples, and --sample-prompts 0 asks for none; drop one of the two",
    ),
    Unread(
        ("alarm_window", "on_alarm"),
        lambda args: not _alarms(args),
        "needs an alarm, and all of them are switched off (0); drop it",
    ),
    Unread(
        ("lr_warmup_steps",),
        lambda args: args.lr_scheduler == "constant",
        "does nothing under --lr-scheduler constant; pass --lr-scheduler constant_with_warmup",
        each_trainer=True,
    ),
    Unread(
        ("ema_start_step",),
        lambda args: args.ema_start_step >= args.num_rollout,
        "lies beyond the last student step (--num-rollout), so that the average would be the student itself; name an "
        "earlier one",
    ),
    Unread(
        ("lr_scheduler",),
        lambda args: args.lr_scheduler == "constant_with_warmup" and args.lr_warmup_steps == 0,
        "has no warm-up without --lr-warmup-steps; pass that, or --lr-scheduler constant",
        each_trainer=True,
    ),
)
"""A new flag that something can switch off gets a row here, or in its modality."""
Where = tuple[str, str]
"""(role of a trainer, or nothing for the whole run; argument)."""


def check_idle(args: Args) -> None:
    """Raises ConfigError for the first argument that would do nothing."""
    for (role, name), (value, why) in idle(args).items():
        raise ConfigError(f"{flag_name(name, role)} {_written(value)}{why}")


def idle(args: Args) -> dict[Where, tuple[object, str]]:
    """Arguments that are given and read by nobody -> value, and why. A value that is the default asks for nothing."""
    found: dict[Where, tuple[object, str]] = {}
    rows = [(unread, args) for unread in UNREAD]
    rows += [(unread, args.modality_options) for unread in _modality_of(args).idle]
    for unread, holder in rows:
        given = _of_trainers(args, unread) if unread.each_trainer else _of_run(args, unread, holder)
        for where, value in given:
            found.setdefault(where, (value, unread.why))
    return found


def _modality_of(args: Args) -> Modality:
    return registry.load("modalities", registry.load("losses", args.loss_type).modality)


def without_idle(preset: Given, typed: Given, args_of: Callable[[Given], Args]) -> Given:
    """``preset`` without what ``typed``, the flags of the command line, have switched off: whoever adds --local to a
    preset for a cluster need not strike its Ray flags out. What is idle in the preset by itself stays, to be refused.
    """
    by_itself, together = idle(args_of(preset)), idle(args_of(preset.under(typed)))
    dropped = together.keys() - by_itself.keys()
    if dropped:
        names = ", ".join(sorted(flag_name(name, role).removeprefix("--") for role, name in dropped))
        logger.info("flags of the command line switch off what the preset asks for: %s", names)
    return preset.without(dropped)


def _of_run(args: Args, unread: Unread, holder: Any) -> Iterator[tuple[Where, object]]:
    """``holder`` has the arguments: the run, or its modality's options. An alarm's 0 switches it off, and asks for
    nothing either."""
    if unread.when(args):
        for name in unread.arguments:
            value = getattr(holder, name)
            if value != defaults_of(type(holder))[name] and not (name.startswith("alarm_") and value == 0):
                yield ("", name), value


def _of_trainers(args: Args, unread: Unread) -> Iterator[tuple[Where, object]]:
    """An argument that all trainers share is read where one of them reads it."""
    trainers = [(trainer, compute_trainer_args(args, trainer)) for trainer in compute_trainer_configs(args)]
    for name in unread.arguments:
        sharing = [own for trainer, own in trainers if name not in trainer.overrides]
        if sharing and all(map(unread.when, sharing)) and getattr(args, name) != defaults_of(type(args))[name]:
            yield ("", name), getattr(args, name)
        for trainer, own in trainers:
            if name in trainer.overrides and getattr(own, name) != defaults_of(type(own))[name] and unread.when(own):
                yield (trainer.role, name), getattr(own, name)


def _written(value: object) -> str:
    """Value between a flag and the words after it."""
    return "" if value is True else f"{value} "


def defaults_of(arguments: type) -> dict[str, Any]:
    return {row.name: row.default for row in fields(arguments) if row.default is not MISSING}
