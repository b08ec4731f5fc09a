"""Progress bar in a terminal, progress lines in a file, ETA."""

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self, TextIO


class Progress:
    """A context manager over the cycles of a run: ``advance(row)`` after each, with that cycle's metrics.

    In a terminal, a bar with elapsed time, time left and the ``shown`` metrics, where a cycle has them. Elsewhere a
    line per cycle, at most one every ``min_seconds`` (the first and the last always), so that a log file stays
    readable. Time left is estimated over the last cycles: those of the warm-up have no student phase and are shorter.
    Only what the cycles themselves took counts: a first grid of samples may take longer than all of them.
    """

    def __init__(
        self,
        total: int,
        *,
        done: int = 0,
        shown: Sequence[str] = (),
        stream: TextIO | None = None,
        min_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total, self.done, self.shown, self.min_seconds = total, done, tuple(shown), min_seconds
        self._stream, self._clock = stream or sys.stderr, clock
        self._seconds: list[float] = []
        self._printed = -math.inf
        self._bar: TerminalBar | None = None

    def __enter__(self) -> Self:
        if self._stream.isatty():
            self._bar = TerminalBar(self._stream, self.total, self.done)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, row: Mapping[str, float], seconds: float) -> None:
        """One more cycle is committed, which took ``seconds``; ``row`` holds its metrics."""
        self.done += 1
        self._seconds = [*self._seconds[-19:], seconds]
        if self._bar is not None:
            self._bar.update(self.done, clock_time(self.seconds_left), self._metrics(row))
        elif self.done == self.total or self._clock() - self._printed >= self.min_seconds:
            self._printed = self._clock()
            print(self._line(row), file=self._stream, flush=True)

    @property
    def seconds_a_cycle(self) -> float:
        """Mean over the last 20 cycles."""
        return sum(self._seconds) / max(1, len(self._seconds))

    @property
    def seconds_left(self) -> float:
        return (self.total - self.done) * self.seconds_a_cycle

    def _line(self, row: Mapping[str, float]) -> str:
        parts = [f"cycle {self.done}/{self.total}", self._metrics(row)]
        parts += [f"{self.seconds_a_cycle:.2f} s/cycle", f"{clock_time(self.seconds_left)} left"]
        return "  ".join(part for part in parts if part)

    def _metrics(self, row: Mapping[str, float]) -> str:
        return "  ".join(f"{name} {number(row[name])}" for name in self.shown if name in row)


def clock_time(seconds: float) -> str:
    """75 -> "1:15", 3675 -> "1:01:15"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def number(value: float) -> str:
    """Four digits: 0.1234, 12.34, 12346, 1.2e-05."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if 1e-3 <= abs(value) < 1e3:
        return f"{value:#.4g}"
    return f"{value:.0f}" if 1e3 <= abs(value) < 1e6 else f"{value:.1e}"


class TerminalBar:
    """A bar and, below it, a line of metrics; what is printed or logged meanwhile goes above them."""

    def __init__(self, stream: TextIO, total: int, done: int) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = [TextColumn("cycle"), MofNCompleteColumn(), BarColumn(bar_width=24), TimeElapsedColumn()]
        self._bar = Progress(*columns, TextColumn("[cyan]{task.fields[left]} left[/]"))
        self._task = self._bar.add_task("", total=total, completed=done, left="--:--")
        self._live = Live(self._bar, console=Console(file=stream), refresh_per_second=4)
        self._live.start()

    def update(self, done: int, left: str, metrics: str) -> None:
        from rich.console import Group
        from rich.text import Text

        self._bar.update(self._task, completed=done, left=left)
        self._live.update(Group(self._bar, Text(metrics, style="dim", no_wrap=True, overflow="ellipsis")))

    def stop(self) -> None:
        self._live.stop()
