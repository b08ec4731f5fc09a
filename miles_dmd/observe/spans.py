"""Time spans: a Chrome trace, and totals that add up to the whole.

Each instant counts for one name alone: the span that began last of those open at it (so what is nested takes its time
out of what it is nested in, and ranks that work at once count once), or "other" when none is open.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from miles_dmd.files import atomic_write_text

OTHER = "other"
TIME_PREFIX = "time/"
TRACED = 100_000
"""Spans of a trace: some 10,000 cycles, and a file of 11 MB."""
SUMMED = 10_000


@dataclass(frozen=True, slots=True)
class Span:
    """``start`` in seconds since the epoch, ``duration`` in seconds; ``group`` did it, ``rank`` of it."""

    name: str
    group: str
    start: float
    duration: float
    rank: int = 0

    @property
    def end(self) -> float:
        return self.start + self.duration


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment of a log: totals can be asked for from here on."""

    time: float
    index: int


class SpanLog:
    """Spans of a run. ``phases`` name those that come first in its totals; ``clock`` gives seconds since the epoch.

    Memory stays bounded however long the run is: the trace has the last TRACED spans, and older ones are summed up.
    """

    def __init__(self, phases: Sequence[str] = (), clock: Callable[[], float] = time.time) -> None:
        self.phases, self._clock = phases, clock
        self.traced: deque[Span] = deque(maxlen=TRACED)
        self.start = Mark(clock(), 0)
        self._summed: dict[str, float] = {}
        self._summed_until = self.start
        self._since_then: list[Span] = []

    @contextmanager
    def span(self, name: str, group: str = "driver", rank: int = 0) -> Iterator[None]:
        """Everything within the ``with`` block; kept also when the block raises."""
        start = self._clock()
        try:
            yield
        finally:
            self.add(name, group, start, self._clock() - start, rank)

    def add(self, name: str, group: str, start: float, duration: float, rank: int = 0) -> None:
        """A span that was measured elsewhere, in a trainer's own process for instance."""
        span = Span(name, group, start, max(0.0, duration), rank)
        self.traced.append(span)
        self._since_then.append(span)

    def mark(self) -> Mark:
        """Now: between two cycles, when no span is open."""
        now = Mark(self._clock(), self._summed_until.index + len(self._since_then))
        if len(self._since_then) >= SUMMED:
            self._summed = self._total(now.time)
            self._summed_until, self._since_then = now, []
        return now

    def _total(self, end: float) -> dict[str, float]:
        found = attributed(self._since_then, self._summed_until.time, end)
        return {name: self._summed.get(name, 0.0) + found.get(name, 0.0) for name in self._summed | found}

    def totals(self, since: Mark | None = None) -> dict[str, float]:
        """Seconds by name from ``since`` (or the log's beginning) until now; they add up to that wall time.

        The phases of the cycle come first, in their order and if only with 0; "other" comes last. Raises ValueError for
        a mark that is so old that what came after it has been summed up.
        """
        if since is None:
            found = self._total(self._clock())
        elif since.index >= self._summed_until.index:
            found = attributed(self._since_then[since.index - self._summed_until.index :], since.time, self._clock())
        else:
            raise ValueError(f"the spans since {since} have been summed up until {self._summed_until}")
        other = found.pop(OTHER, 0.0)
        return {name: found.pop(name, 0.0) for name in self.phases} | found | {OTHER: other}

    def write(self, path: str | Path) -> None:
        """A Chrome trace (chrome://tracing, ui.perfetto.dev): a process a group, a thread a rank."""
        atomic_write_text(path, json.dumps(chrome_trace(self.traced, self.start.time)))


def time_metrics(totals: Mapping[str, float]) -> dict[str, float]:
    """{"critic train": 1.5} -> {"time/critic_train": 1.5}: a cycle's totals as metrics, which the curves stack."""
    return {f"{TIME_PREFIX}{name.replace(' ', '_')}": seconds for name, seconds in totals.items()}


def attributed(spans: Sequence[Span], begin: float, end: float) -> dict[str, float]:
    """Seconds by name between ``begin`` and ``end``, each instant counted once; they add up to end - begin."""
    edges = sorted({begin, end, *(t for span in spans for t in (span.start, span.end) if begin < t < end)})
    waiting = sorted(spans, key=lambda span: span.start, reverse=True)
    open_spans: list[Span] = []
    seconds: dict[str, float] = {}
    for left, right in pairwise(edges):
        while waiting and waiting[-1].start <= left:
            open_spans.append(waiting.pop())
        open_spans = [span for span in open_spans if span.end > left]
        name = open_spans[-1].name if open_spans else OTHER  # appended in order of their start
        seconds[name] = seconds.get(name, 0.0) + right - left
    return seconds


def chrome_trace(spans: Collection[Span], origin: float) -> dict[str, Any]:
    """{"traceEvents": ...} with times in microseconds since ``origin`` (trace event format, "X" and "M" events)."""
    groups = {group: number for number, group in enumerate(dict.fromkeys(span.group for span in spans), start=1)}
    events: list[dict[str, Any]] = []
    for group, pid in groups.items():
        events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": group}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}})
    for group, rank in dict.fromkeys((span.group, span.rank) for span in spans):
        named = {"name": f"{group} rank {rank}"}
        events.append({"ph": "M", "name": "thread_name", "pid": groups[group], "tid": rank, "args": named})
    for span in spans:
        times = {"ts": round((span.start - origin) * 1e6, 1), "dur": round(span.duration * 1e6, 1)}
        events.append(
            {"ph": "X", "name": span.name, "cat": span.group, "pid": groups[span.group], "tid": span.rank, **times}
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
