"""Export of the last and, with --keep-best, the best student."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from miles_dmd.checkpoint.store import run_directory
from miles_dmd.contracts.reports import ENOUGH
from miles_dmd.contracts.student import StudentRecord
from miles_dmd.errors import FormatError, SaveError
from miles_dmd.executor import GroupExecutor
from miles_dmd.files import atomic_write_text, copy_tree, recover_directory, remove_tree, replace_directory
from miles_dmd.preflight.resolved import ResolvedRun
from miles_dmd.preflight.resume import Resume
from miles_dmd.preflight.run_directory import continues

logger = logging.getLogger(__name__)

STUDENT = "student"
BEST_STUDENT = "student_best"
BEST = "best.json"
NEW = ".new"
"""Behind the name of a best student that is being written."""


def export_student(run: ResolvedRun, executor: GroupExecutor, directory: Path) -> StudentRecord:
    """Write what the plan exports, the student or its moving average, for stock libraries; returns its record."""
    described = run.modality.describe(run, executor.policy_version)
    with executor.spans.span("save", group="rollout"):
        # absolute: the worker that writes it may have been started elsewhere
        report = executor.export(directory.resolve(), described)
    if report.change_kept < ENOUGH:
        logger.warning("%s is in %s; --export-dtype fp32 keeps all", directory.name.removesuffix(NEW), report)
    return replace(described, weights=report)


def nothing_left(run: ResolvedRun) -> str:
    """Reason why going on would only end with the student that lies there; empty where there is work left."""
    args, resume = run.args, run.resume
    if resume is None:
        return ""
    steps, student = resume.manifest.counters["global_step"], (run_directory(resume.directory) or Path()) / STUDENT
    if steps < args.num_rollout or resume.allowed or not continues(args):
        return ""
    if not _is_exported(student, run, resume):
        return ""
    return (
        f"Nothing is left to do: {resume.directory} has all {steps} student steps, and its student is {student}. To "
        "train on, raise --num-rollout; to export it again, remove it."
    )


def _is_exported(student: Path, run: ResolvedRun, resume: Resume) -> bool:
    """True if the student lies there as it would be exported again. The summary is written after it, last of all."""
    try:
        found = run.modality.read_record(student)
    except FormatError:
        return False
    if found.weights is None or found.weights.dtype != found.weights.due(run.args.export_dtype):
        return False
    return found.policy_version == resume.manifest.policy_version and (student.parent / "summary.json").is_file()


class KeepBest:
    """The best student so far in ``directory``, beside the last: --keep-best says by which metric, and which way.

    Every --sample-interval student steps and after the last it judges the metric's mean since it last judged, so that
    one lucky batch is not the best student. best.json in ``directory`` tells metric, value and step. A run that goes on
    from one in another directory takes its best student over from ``earlier``.
    """

    def __init__(self, run: ResolvedRun, directory: Path, earlier: Path | None = None) -> None:
        self.run, self.args, self.directory, self.earlier = run, run.args, directory, earlier
        asked: str = run.args.keep_best or ""
        self.way, _, self.metric = asked.partition(":")
        self._values: list[float] = []
        self._best: dict[str, Any] = {}
        """Content of best.json."""
        self._new = directory.with_name(directory.name + NEW)
        recover_directory(directory)
        remove_tree(self._new)  # of a process that died before it was whole, or after its turn

    def committed(self, row: Mapping[str, float], executor: GroupExecutor) -> None:
        """``row`` holds the metrics of a committed cycle."""
        step = int(row["global_step"])
        if not self.metric or step == 0:
            return
        if self.metric in row:
            self._values.append(row[self.metric])
        if step % self.args.sample_interval and step != self.args.num_rollout:
            return
        values, self._values = self._values, []
        if not values:
            logger.warning("--keep-best %s: no such number up to step %d; nothing to judge", self.args.keep_best, step)
        elif self._is_better(value := math.fsum(values) / len(values)):
            self._keep({"metric": self.metric, "value": value, "global_step": step}, executor)

    def _is_better(self, value: float) -> bool:
        if not math.isfinite(value) or not self._best:
            return math.isfinite(value)
        return bool(value < self._best["value"] if self.way == "min" else value > self._best["value"])

    def _keep(self, best: dict[str, Any], executor: GroupExecutor) -> None:
        if self._replaced(best, lambda new: export_student(self.run, executor, new)):
            self._best = best

    def _replaced(self, best: Mapping[str, Any], write: Callable[[Path], object]) -> bool:
        """The new one is whole before the old one goes. On a full disk the old one stays, and what was written of the
        new one goes: a later one that is better is tried again. Raises SaveError with --on-save-failure stop."""
        try:
            remove_tree(self._new)
            write(self._new)
            atomic_write_text(self._new / BEST, json.dumps(best) + "\n")
            replace_directory(self._new, self.directory)
        except (SaveError, OSError) as error:
            self._failed(best, error)
            return False
        return True

    def _failed(self, best: Mapping[str, Any], error: SaveError | OSError) -> None:
        for left in (self._new, self._new.with_name(f"{self._new.name}.partial")):
            with contextlib.suppress(OSError):
                remove_tree(left)
        reason = (error.strerror or "not all files could be copied") if isinstance(error, OSError) else str(error)
        kept = f"that of step {self._best['global_step']} stays" if self._best else "there is none before it"
        message = (
            f"the best student, of step {best['global_step']}, could not be written to {self.directory} ({reason})"
        )
        if self.args.on_save_failure == "stop":
            raise SaveError(f"{message}; make room, or go on without by --on-save-failure continue") from error
        logger.warning("%s; %s, and the run goes on", message, kept)

    def state_dict(self) -> dict[str, Any]:
        # a number that is not finite spoils the mean of its interval, and JSON has none
        values = [value if math.isfinite(value) else None for value in self._values]
        return {"metric": self.metric, "way": self.way, "values": values, "best": self._best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing of a run that was asked for another metric."""
        if (self.metric, self.way) != (state["metric"], state["way"]) or not self.metric:
            return
        self._values = [math.nan if value is None else value for value in state["values"]]
        self._best = dict(state["best"])
        if self._best and read_best(self.directory) != self._best:
            self._take_over()

    def _take_over(self) -> None:
        """The best student of the run so far is elsewhere, or has made way for a later one that is not of this run."""
        if self.earlier is not None and read_best(self.earlier) == self._best:
            earlier = self.earlier
            if self._replaced(self._best, lambda new: copy_tree(earlier, new)):
                return
        logger.warning(
            "%s: the best student so far (%s %.6g after step %d) is not kept any more; the next has to beat it",
            self.directory, self.metric, self._best["value"], self._best["global_step"],
        )  # fmt: skip


def read_best(directory: Path) -> dict[str, Any]:
    """Content of best.json in ``directory``; empty where there is none."""
    try:
        return dict(json.loads((directory / BEST).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}
