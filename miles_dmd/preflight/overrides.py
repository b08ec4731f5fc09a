"""Arguments that a trainer may override: none of the whole run's, and none that it does not read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_dmd.config.args import Args, OptimArgs
from miles_dmd.config.flags import per_trainer
from miles_dmd.config.values import flag_name, kinds
from miles_dmd.errors import ConfigError

if TYPE_CHECKING:
    from miles_dmd.contracts.loss import LossType
    from miles_dmd.contracts.modality import Modality
    from miles_dmd.plan import DistillationPlan
    from miles_dmd.preflight.resolved import ResolvedRun

RUN_WIDE = {
    "model_family": "networks of one run look at each other's samples, so a run has one family",
    "save": "a run has one directory for all its trainers",
    "load": "a checkpoint holds all trainers of a run",
    "teacher_checkpoint": "a run has one teacher",
    "ema_decay": "a run has one moving average, the student's",
    "ema_start_step": "a run has one moving average, the student's",
}
"""Reasons why some arguments are the run's; of the others it goes without saying."""
OF_THE_AVERAGE = ("ema_decay", "ema_start_step")
OF_THE_STEP = frozenset(kinds(OptimArgs)) - {"micro_batch_size", "num_trainer_ranks"} | {"gradient_checkpointing"}
"""Arguments that a group reads only if something in it trains."""


def check_run_wide(args: Args, loss_type: LossType, modality: Modality) -> None:
    """Raises ConfigError for an override of an argument that the run has one of."""
    options = dict.fromkeys(loss_type.run_wide, "a run has one schedule and one teacher")
    options |= {alarm.option: "alarms are the run's, not a trainer's" for alarm in loss_type.alarms}
    run_wide = {*kinds(Args), *kinds(modality.options)} - set(per_trainer())
    whole = dict.fromkeys(run_wide, "it applies to the whole run, not to one trainer")
    reasons = {**whole, **RUN_WIDE, **options}
    for trainer in args.trainers:
        for name in trainer.overrides.keys() & reasons.keys():
            raise ConfigError(f"{_given(trainer.role, name, args)}: {reasons[name]}; pass {flag_name(name)}")


def check_read(run: ResolvedRun) -> None:
    """Raises ConfigError for an override that its trainer would not read: it would do nothing, and seem to."""
    args, plan = run.args, run.plan
    if plan.averaged_role is None:
        for name in OF_THE_AVERAGE:
            if (value := getattr(args, name)) != getattr(Args, name):
                raise ConfigError(f"{flag_name(name)} {value}: the plan keeps no moving average; drop it")
    for trainer in args.trainers:
        for name in trainer.overrides:
            if why := _unread(name, trainer.role, plan, run.loss_type):
                raise ConfigError(f"{_given(trainer.role, name, args)}: {why}; drop it")


def _unread(name: str, role: str, plan: DistillationPlan, loss_type: LossType) -> str:
    """Reason why the group ``role`` does not read it; empty where it does."""
    if name in OF_THE_STEP and not plan.trainable_roles_of(role):
        return f"nothing in the {role} trains"
    readers = loss_type.readers.get(name, (role,))
    return "" if role in readers else f"the {role} does not read it, only the {' and the '.join(readers)} does"


def _given(role: str, name: str, args: Args) -> str:
    overrides = next(trainer.overrides for trainer in args.trainers if trainer.role == role)
    return f"{flag_name(name, role)} {overrides[name]}"
