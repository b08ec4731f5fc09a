"""Metrics, alarms, panels of curves and headline of on-policy distillation. Knows no torch."""

from __future__ import annotations

import math

from miles_dmd.observe.alarms import Alarm, History, growth
from miles_dmd.observe.pictures import Panel

KL, COARSE, HEAD_MASS = "opd/kl", "opd/kl_coarse", "opd/student_head_mass"
EVENT, EVENT_VARIANCE, TOKENS = "opd/event", "opd/event_variance", "actor/tokens"
METRICS = (
    KL,
    COARSE,
    "opd/residual",
    "opd/residual_abs",
    "opd/head_hit",
    HEAD_MASS,
    "opd/teacher_head_mass",
    "opd/tail_log_ratio",
    "opd/overlap",
    "opd/observed_score_gap",
    "opd/rollout_drift",
    "opd/importance_weight",
    EVENT,
    EVENT_VARIANCE,
)
"""Means over the valid response tokens of a phase."""


def on_policy_z(history: History, window: int) -> float | None:
    """Standard deviations by which head hits differ from the student's head mass: standard normal on policy.

    z = sum(hit - P) / sqrt(sum P (1 - P)) over tokens, from the two means and the number of tokens, so that neither
    micro-batches nor ranks change it.
    """
    event, variance, tokens = (history.last.get(key) for key in (EVENT, EVENT_VARIANCE, TOKENS))
    if event is None or variance is None or tokens is None or variance <= 0:
        return None
    return event * math.sqrt(tokens / variance)


ALARMS = (
    Alarm(
        "on_policy",
        "opd/on_policy_z",
        on_policy_z,
        "the tokens are not drawn from the student that trains: sampling other than temperature 1 and full support "
        "(positive), or teacher and tokens misaligned (negative)",
        two_sided=True,
    ),
    Alarm(
        "head_mass",
        "opd/head_mass_growth",
        lambda history, window: growth(history[HEAD_MASS], window),
        "the student leaves the teacher's head: a lower --lr, or a larger --opd-top-k",
        below=True,
        series=HEAD_MASS,
    ),
    Alarm(
        "kl",
        "opd/kl_growth",
        lambda history, window: growth(history[COARSE], window),
        "the student moves away from the teacher: a lower --lr, or an earlier checkpoint",
        series=COARSE,
    ),
)
PANELS = (
    Panel("Reverse KL", (KL, COARSE), log=True),
    Panel("Mass on the teacher's head", (HEAD_MASS, "opd/teacher_head_mass", "opd/head_hit")),
    Panel("Residual", ("opd/residual", "opd/residual_abs")),
    Panel("On-policy z", ("opd/on_policy_z",)),
    Panel("Gradient norm", ("actor/grad_norm",), log=True),
)
HEADLINE = (KL, COARSE, HEAD_MASS, "actor/grad_norm")
