"""Alarms, panels of curves and headline metrics of DMD2. Knows no torch."""

from __future__ import annotations

from miles_dmd.observe.alarms import Alarm, History, growth, slope
from miles_dmd.observe.pictures import Panel

GAP, FAKE_LOSS = "actor/teacher_critic_gap", "critic/loss"


def _relative_drift(history: History, window: int) -> float | None:
    drift, std = history.last.get("actor/rollout_drift"), history.last.get("actor/generated_std", 0.0)
    return drift / std if drift is not None and std > 0 else None


ALARMS = (
    Alarm(
        "critic_lag",
        "critic/lag",
        lambda history, window: growth(history[GAP], window),
        "the fake score does not follow the student: more --fake-update-ratio, a higher --critic-lr, or stop earlier",
        series=GAP,
    ),
    Alarm(
        "critic_loss_slope",
        "critic/loss_slope",
        lambda history, window: slope(history[FAKE_LOSS], window),
        "the fake score does not follow the student: more --fake-update-ratio, or a higher --critic-lr",
        series=FAKE_LOSS,
    ),
    Alarm(
        "rollout_drift",
        "actor/relative_rollout_drift",
        _relative_drift,
        "the engine does not sample what the actor computes: weights, conditions or precision of the two differ",
    ),
)
PANELS = (
    Panel("Losses", ("actor/loss", FAKE_LOSS), log=True),
    Panel("Gap between teacher and critic", (GAP,)),
    Panel("Gradient norms", ("actor/grad_norm", "critic/grad_norm"), log=True),
    Panel("Normaliser", ("actor/normalizer",)),
    Panel("Drift from the rollout's sample", ("actor/rollout_drift",), log=True),
)
HEADLINE = ("actor/loss", FAKE_LOSS, GAP, "actor/grad_norm", "critic/grad_norm")
