"""Alarms on training metrics: a number, a threshold, and what it is a sign of.

Loss types and modalities declare their own, with a threshold ``alarm_<name>`` among their options. A cycle's row
gets ``alarm/<name>``, 0 or 1, where the number could be told; a threshold of 0 switches an alarm off.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    """True if small values are the bad ones."""
    two_sided: bool = False
    """True if values far from 0 are the bad ones, on either side."""
    series: str = ""
    """The key whose earlier values ``measure`` looks at, where it looks at earlier ones."""

    @property
    def option(self) -> str:
        """The argument that holds its threshold."""
        return f"alarm_{self.name}"

    @property
    def flag(self) -> str:
        return f"--{self.option.replace('_', '-')}"

    def rings(self, value: float, threshold: float) -> bool:
        value = abs(value) if self.two_sided else value
        return value < threshold if self.below else value > threshold


class History:
    """Finite values of the metrics in ``series``, in the order of cycles; and the last cycle's of all."""

    def __init__(self, series: Iterable[str]) -> None:
        # whole, not the windows alone: a resumed run may have another window
        self.series: dict[str, list[float]] = {key: [] for key in series}
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


def latest(metric: str) -> Callable[[History, int], float | None]:
    """A measure: the last cycle's value of ``metric``."""
    return lambda history, window: history.last.get(metric)


class Alarms:
    """The alarms of a run, each with its threshold: ``check`` each cycle's row. ``window`` in cycles."""

    def __init__(self, thresholds: Mapping[Alarm, float], window: int) -> None:
        self.thresholds, self.window = thresholds, window
        self.history = History(alarm.series for alarm in thresholds if alarm.series)
        self.ringing: frozenset[str] = frozenset()

    def state_dict(self) -> dict[str, Any]:
        return {"series": self.history.series, "ringing": sorted(self.ringing)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the series and the ringing alarms. Logs nothing."""
        for key, values in self.history.series.items():
            values[:] = state["series"].get(key, ())
        armed = {alarm.name for alarm, threshold in self.thresholds.items() if threshold}
        self.ringing = frozenset(armed & set(state["ringing"]))

    def check(self, row: Row) -> dict[str, float]:
        """Additions to a cycle's row: every number that can be measured, and 1 or 0 for beyond its threshold or not."""
        self.history.add(row)
        found: dict[str, float] = {}
        ringing = set(self.ringing)
        for alarm, threshold in self.thresholds.items():
            value = alarm.measure(self.history, self.window)
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
            "below" if alarm.below else "beyond" if alarm.two_sided else "above", alarm.flag, threshold, alarm.cure,
        )  # fmt: skip
