"""Run logging: metrics rows, progress bar; at the end curves, trace, summary and two tables."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from miles_dmd.errors import SaveError
from miles_dmd.executor import GroupExecutor
from miles_dmd.observe.alarms import Alarms
from miles_dmd.observe.best_effort import BestEffort
from miles_dmd.observe.metrics import flatten, read_metrics
from miles_dmd.observe.pictures import curves
from miles_dmd.observe.progress import Progress
from miles_dmd.observe.spans import SpanLog, time_metrics
from miles_dmd.observe.summary import memory_rows, table, time_rows, write_summary
from miles_dmd.observe.trackers import open_trackers
from miles_dmd.plan import DistillationTrainerController, TrainerCounters
from miles_dmd.preflight.metric_names import span_names
from miles_dmd.preflight.resolved import ResolvedRun
from miles_dmd.preflight.resume import Resume
from miles_dmd.version import VERSION

logger = logging.getLogger(__name__)


class RunLogger:
    """A context manager around the training of a run whose groups are up; ``directory`` is the run's own."""

    def __init__(
        self, run: ResolvedRun, directory: Path, num_cycles: int | None = None, resume: Resume | None = None
    ) -> None:
        """``num_cycles`` more cycles are to come, by default until --num-rollout."""
        args, plan = run.args, run.plan
        self.run, self.directory = run, directory
        done = 0 if resume is None else resume.manifest.cycle
        cycles = plan.update_schedule.warmup_cycles + args.num_rollout if num_cycles is None else done + num_cycles
        self.spans = SpanLog(span_names(plan))
        self.trackers = open_trackers(
            directory,
            tensorboard=args.tensorboard,
            wandb_project=args.wandb_project,
            config=dataclasses.asdict(args),
            done=done,
        )
        headline = run.loss_type.headline or tuple(f"{group}/loss" for group in plan.groups)
        self.progress = Progress(total=cycles, done=done, shown=headline)
        self._bar = BestEffort("the progress bar")
        self.logged = done
        """Cycles of which there is a row."""
        self.group_of_phase = {
            phase.kind: plan.group_of(phase.trainable_roles[0]) for phase in plan.update_schedule.phases
        }
        self.alarms = Alarms(run.alarms, args.alarm_window)
        self._noted: dict[str, float] = {}
        self._mark = self.spans.mark()

    def __enter__(self) -> Self:
        print(f"Writing to {self.directory}")
        self.progress.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._bar(lambda: self.progress.__exit__(kind, error, tb))
        BestEffort("trace.json")(lambda: self.spans.write(self.directory / "trace.json"))
        try:
            self.trackers.close()
        except OSError as full:
            lost = f"{self.trackers.rows.path} lacks rows that could not be written ({full.strerror})"
            if error is None:
                raise SaveError(f"{lost}; the student and the last checkpoint are whole") from full
            logger.warning("%s", lost)  # why the run failed comes first

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
        self.logged = counters.completed_cycles
        played = sum(times[name] for name in self.spans.phases if name != "save")
        self._bar(lambda: self.progress.advance(row, played))
        return row

    def sync(self) -> None:
        """Every row is on the disk. Raises OSError."""
        self.trackers.rows.sync()

    def finish(self, executor: GroupExecutor, controller: DistillationTrainerController) -> None:
        """Curves, summary.json, and what the console shows last."""
        self._bar(lambda: self.progress.__exit__(None, None, None))
        rows = read_metrics(self.directory / "metrics.jsonl")
        totals = self.spans.totals()
        peaks = executor.peak_memory()
        if rows:
            title = f"{self.run.args.loss_type}, {controller.counters.global_step} student steps"
            panels = [*self.run.loss_type.panels, *self.run.modality.panels]
            BestEffort("curves.png")(lambda: curves(rows, self.directory / "curves.png", panels, title=title))
        summary = {
            "version": VERSION,
            "plan": {"name": self.run.plan.name, "fingerprint": self.run.plan.fingerprint},
            "counters": dataclasses.asdict(controller.counters),
            "skipped_cycles": controller.skipped_cycles,
            "policy_version": executor.policy_version,
            "seconds": totals,
            "peak_memory_bytes": peaks,
            "alarms": sorted(self.alarms.ringing),
            "last_cycle": rows[-1] if rows else {},
        }
        BestEffort("summary.json")(lambda: write_summary(self.directory / "summary.json", summary))
        table("Time by phase", ("phase", "seconds", "share"), time_rows(totals))
        table("Peak memory", ("group", "peak"), memory_rows(peaks))
        pictures = [self.directory / name for name in ("samples", "curves.png") if (self.directory / name).exists()]
        print(f"Student: {self.directory / 'student'}   pictures: {', '.join(map(str, pictures))}")
