"""What a run tells: a row of metrics a cycle, a progress bar; at the end curves, a trace, a summary and two tables."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from miles_dmd.config.args import Args
from miles_dmd.executor import GroupExecutor
from miles_dmd.observe.alarms import ALARMS, Alarms
from miles_dmd.observe.metrics import flatten, read_metrics
from miles_dmd.observe.pictures import curves
from miles_dmd.observe.progress import Progress
from miles_dmd.observe.spans import PHASES, SpanLog, time_metrics
from miles_dmd.observe.summary import memory_rows, table, time_rows, write_summary
from miles_dmd.observe.trackers import open_trackers
from miles_dmd.plan import DistillationPlan, DistillationTrainerController, TrainerCounters
from miles_dmd.version import VERSION

logger = logging.getLogger(__name__)


class Journal:
    """A context manager around the training of a run whose groups are up; ``directory`` is the run's own."""

    def __init__(
        self, args: Args, plan: DistillationPlan, directory: Path, num_cycles: int | None, done: int = 0
    ) -> None:
        """``done`` cycles were committed before, by the run whose checkpoint this one goes on from."""
        self.args, self.plan, self.directory = args, plan, directory
        cycles = plan.update_schedule.warmup_cycles + args.num_rollout if num_cycles is None else done + num_cycles
        self.spans = SpanLog()
        self.trackers = open_trackers(
            directory,
            tensorboard=args.tensorboard,
            wandb_project=args.wandb_project,
            config=dataclasses.asdict(args),
        )
        self.progress = Progress(total=cycles, done=done)
        self.group_of_phase = {
            phase.kind: plan.group_of(phase.trainable_roles[0]) for phase in plan.update_schedule.phases
        }
        self.alarms = Alarms({alarm.name: getattr(args, f"alarm_{alarm.name}") for alarm in ALARMS}, args.alarm_window)
        self._noted: dict[str, float] = {}
        self._mark = self.spans.mark()

    def __enter__(self) -> Self:
        print(f"Writing to {self.directory}")
        self.progress.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.progress.__exit__(kind, error, tb)
        try:
            self.trackers.close()
            self.spans.write(self.directory / "trace.json")
        except OSError as full:
            if error is None:
                raise
            logger.warning("%s has no trace.json (%s)", self.directory, full.strerror)  # why the run failed comes first

    def note(self, metrics: Mapping[str, float]) -> None:
        """Numbers that the next row holds beside those of its phases."""
        self._noted |= metrics

    def committed(self, counters: TrainerCounters, phase_metrics: Mapping[str, Any]) -> dict[str, float]:
        """The controller's observer: a cycle is committed. Returns its row."""
        times = self.spans.totals(self._mark)
        self._mark = self.spans.mark()
        row = {
            "cycle": counters.completed_cycles,
            "global_step": counters.global_step,
            "seconds": sum(times.values()),
            **flatten(phase_metrics, self.group_of_phase),
            **time_metrics(times),
            **self._noted,
        }
        self._noted = {}
        row |= self.alarms.check(row)
        self.trackers.write(row)
        self.progress.advance(row, sum(times[name] for name in PHASES if name != "save"))
        return row

    def finish(self, executor: GroupExecutor, controller: DistillationTrainerController) -> None:
        """Curves, summary.json, and what the console shows last."""
        counters = controller.counters
        self.progress.__exit__(None, None, None)
        rows = read_metrics(self.directory / "metrics.jsonl")
        if rows:
            curves(
                rows,
                self.directory / "curves.png",
                title=f"{self.args.loss_type}, {counters.global_step} student steps",
            )
        totals = self.spans.totals()
        peaks = {**executor.peak_memory, "rollout": executor.rollouts.peak_memory()}
        write_summary(
            self.directory / "summary.json",
            {
                "version": VERSION,
                "plan": {"name": self.plan.name, "fingerprint": self.plan.fingerprint},
                "counters": dataclasses.asdict(counters),
                "skipped_cycles": controller.skipped_cycles,
                "policy_version": executor.policy_version,
                "seconds": totals,
                "peak_memory_bytes": peaks,
                "alarms": sorted(self.alarms.ringing),
                "last_cycle": rows[-1] if rows else {},
            },
        )
        table("Time by phase", ("phase", "seconds", "share"), time_rows(totals))
        table("Peak memory", ("group", "peak"), memory_rows(peaks))
        pictures = [self.directory / name for name in ("samples", "curves.png") if (self.directory / name).exists()]
        print(f"Student: {self.directory / 'student'}   pictures: {', '.join(map(str, pictures))}")
