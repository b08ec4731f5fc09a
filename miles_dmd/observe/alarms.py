"""Alarms on training metrics, each with a threshold and what it is a sign of.

    critic_lag           |teacher - fake score|, by now over early on: the fake score does not follow the student
    critic_loss_slope    rise of the fake score's loss over a window, as a share of its mean: the same, earlier
    saturation           share of |x0| beyond the range of the teacher's: guidance burns in
    diversity            distance between a prompt's seeds, relative to the teacher's: the student forgets modes
    rollout_drift        engine's sample against the actor's own, over the samples' std: weights or precision differ

A cycle's row gets ``alarm/<name>``, 0 or 1, where the number could be told; a threshold of 0 switches an alarm off.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, float]
PREFIX = "alarm/"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Alarm:
    name: str
    metric: str
    """Key under which the number is written."""
    measure: Callable[[History, int], float | None]
    """The number from all rows so far, for a window of that many cycles; None where it cannot be told."""
    cure: str
    below: bool = False
    """Whether small values are the bad ones."""
    series: str = ""
    """The key whose earlier values ``measure`` looks at, where it looks at earlier ones."""

    @property
    def flag(self) -> str:
        return f"--alarm-{self.name.replace('_', '-')}"

    def rings(self, value: float, threshold: float) -> bool:
        return value < threshold if self.below else value > threshold


class History:
    """The finite values of the metrics that alarms follow, in the order of cycles; and the last cycle's of all."""

    def __init__(self) -> None:
        # whole, not the windows alone: a resumed run may have another window
        self.series: dict[str, list[float]] = {alarm.series: [] for alarm in ALARMS if alarm.series}
        self.last: Row = {}

    def add(self, row: Row) -> None:
        self.last = {key: value for key, value in row.items() if math.isfinite(value)}
        for key, values in self.series.items():
            if key in self.last:
                values.append(self.last[key])

    def __getitem__(self, key: str) -> Sequence[float]:
        return self.series[key]


def growth(series: Sequence[float], window: int) -> float | None:
    """Mean of the last ``window`` values over the mean of the first; None until the two do not overlap."""
    if len(series) < 2 * window:
        return None
    early = math.fsum(series[:window]) / window
    return math.fsum(series[-window:]) / window / early if early > 0 else None


def slope(series: Sequence[float], window: int) -> float | None:
    """Rise of the least-squares line through the last ``window`` values from its first to its last, over their mean.

    0 for a level series, 1 for a line that climbs from m/2 to 3m/2. None until there are that many, and two at least.
    """
    recent = series[-window:]
    if len(series) < window or window < 2:
        return None
    middle, mean = (window - 1) / 2, math.fsum(recent) / window
    if mean <= 0:
        return None
    products = math.fsum((index - middle) * value for index, value in enumerate(recent))
    return products / math.fsum((index - middle) ** 2 for index in range(window)) * (window - 1) / mean


def _latest(metric: str) -> Callable[[History, int], float | None]:
    return lambda history, window: history.last.get(metric)


def _drift(history: History, window: int) -> float | None:
    drift, std = history.last.get("actor/rollout_drift"), history.last.get("actor/generated_std", 0.0)
    return drift / std if drift is not None and std > 0 else None


ALARMS = (
    Alarm(
        "critic_lag",
        "critic/lag",
        lambda history, window: growth(history["actor/teacher_critic_gap"], window),
        "the fake score does not follow the student: more --fake-update-ratio, a higher --critic-lr, or stop earlier",
        series="actor/teacher_critic_gap",
    ),
    Alarm(
        "critic_loss_slope",
        "critic/loss_slope",
        lambda history, window: slope(history["critic/loss"], window),
        "the fake score does not follow the student: more --fake-update-ratio, or a higher --critic-lr",
        series="critic/loss",
    ),
    Alarm(
        "saturation",
        "samples/saturation",
        _latest("samples/saturation"),
        "samples leave the data's range: less guidance of the teacher, or an earlier checkpoint",
    ),
    Alarm(
        "diversity",
        "samples/diversity",
        _latest("samples/diversity"),
        "seeds of a prompt come to look alike: an earlier checkpoint, less guidance, or a lower --actor-lr",
        below=True,
    ),
    Alarm(
        "rollout_drift",
        "actor/relative_rollout_drift",
        _drift,
        "the engine does not sample what the actor computes: weights, conditions or precision of the two differ",
    ),
)


class Alarms:
    """The alarms of a run: ``check`` each cycle's row. ``thresholds`` by name; ``window`` in cycles."""

    def __init__(self, thresholds: Mapping[str, float], window: int) -> None:
        self.thresholds, self.window, self.history = thresholds, window, History()
        self.ringing: frozenset[str] = frozenset()

    def state_dict(self) -> dict[str, Any]:
        return {"series": self.history.series, "ringing": sorted(self.ringing)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What is early stays early, and what rings goes on ringing. Logs nothing."""
        for key, values in self.history.series.items():
            values[:] = state["series"].get(key, ())
        self.ringing = frozenset(name for name in state["ringing"] if self.thresholds.get(name))

    def check(self, row: Row) -> dict[str, float]:
        """What this cycle adds to its row: every number that can be told, and whether it is beyond its threshold."""
        self.history.add(row)
        found: dict[str, float] = {}
        ringing = set(self.ringing)
        for alarm in ALARMS:
            value, threshold = alarm.measure(self.history, self.window), self.thresholds[alarm.name]
            if value is None or threshold == 0:
                continue
            rings = alarm.rings(value, threshold)
            found |= {alarm.metric: value, PREFIX + alarm.name: float(rings)}
            (ringing.add if rings else ringing.discard)(alarm.name)
            if rings and alarm.name not in self.ringing:
                self._warn(alarm, value, threshold, row)
        self.ringing = frozenset(ringing)
        return found

    def _warn(self, alarm: Alarm, value: float, threshold: float, row: Row) -> None:
        logger.warning(
            "alarm %s after step %d: %s is %.4g, %s %s %g: %s",
            alarm.name, row.get("global_step", 0), alarm.metric, value,
            "below" if alarm.below else "above", alarm.flag, threshold, alarm.cure,
        )  # fmt: skip
