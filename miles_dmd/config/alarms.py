"""Alarms of a run and their thresholds: the loss type's, and its modality's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_dmd import registry
from miles_dmd.observe.alarms import Alarm

if TYPE_CHECKING:
    from miles_dmd.config.args import Args
    from miles_dmd.contracts.loss import LossType


def alarm_thresholds(args: Args) -> dict[Alarm, float]:
    """Each alarm of the run -> its threshold; 0 is off."""
    loss_type: LossType = registry.load("losses", args.loss_type)
    own = {alarm: getattr(args.loss_options, alarm.option) for alarm in loss_type.alarms}
    modality = registry.load("modalities", loss_type.modality)
    return own | {alarm: getattr(args.modality_options, alarm.option) for alarm in modality.alarms}
