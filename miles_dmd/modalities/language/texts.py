"""Samples as texts: the responses of student and teacher to the first prompts, after committed steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_dmd import seeds
from miles_dmd.contracts.engine import RolloutRequest
from miles_dmd.files import atomic_write_text
from miles_dmd.modalities.language.record import LanguageRecord
from miles_dmd.observe.best_effort import BestEffort
from miles_dmd.plan import TrainerCounters

if TYPE_CHECKING:
    from miles_dmd.config.args import Args
    from miles_dmd.contracts.modality import Report
    from miles_dmd.executor import GroupExecutor
    from miles_dmd.preflight.resolved import ResolvedRun

TEACHER = "teacher.txt"
EXPORTED = "exported.txt"
METRICS = ("samples/length", "samples/ended")


def sample_texts(run: ResolvedRun, texts: Sequence[str], directory: Path, report: Report) -> SampleTexts:
    """The texts of a run."""
    return SampleTexts(run.args, texts, directory, run.teacher_sampling, report)


class SampleTexts:
    """A file of responses, always to the same prompts with the same randomness, so that files can be compared.

    ``report`` hears ``samples/length``, the mean number of tokens, and ``samples/ended``, the share of responses that
    end by themselves. ``teacher`` is empty where there is none here to sample from.
    """

    def __init__(
        self,
        args: Args,
        texts: Sequence[str],
        directory: Path,
        teacher: Mapping[str, Any],
        report: Report = lambda metrics: None,
    ) -> None:
        self.args, self.directory, self.teacher, self.report = args, directory, teacher, report
        self.count = min(len(texts), args.sample_prompts)
        self._drawn: int | None = None
        self._files = BestEffort("a file of samples", each=True)

    def after_completed_step(
        self, counters: TrainerCounters, metrics: Mapping[str, Any], executor: GroupExecutor
    ) -> None:
        last = counters.global_step == self.args.num_rollout
        if last or counters.global_step % self.args.sample_interval == 0:
            self.draw(counters.global_step, executor)

    def draw_teacher(self, executor: GroupExecutor) -> None:
        if self.count and self.teacher and not (self.directory / TEACHER).is_file():
            self._show(TEACHER, "teacher", executor, lambda: executor.show_teacher(self._requests(), self.teacher))

    def draw(self, step: int, executor: GroupExecutor) -> None:
        if not self.count:
            return
        self._drawn = step
        who = f"student after {step} updates"
        show = lambda: executor.show_student(self._requests(), None)  # noqa: E731
        self.report(self._show(f"step_{step:06d}.txt", who, executor, show))

    def finish(self, counters: TrainerCounters, executor: GroupExecutor) -> None:
        if self._drawn != counters.global_step:
            self.draw(counters.global_step, executor)

    def draw_exported(self, directory: Path, student: LanguageRecord, step: int, executor: GroupExecutor) -> None:
        if not self.count or student.weights is None or student.weights.change_kept == 1:
            self._files(lambda: (self.directory / EXPORTED).unlink(missing_ok=True))  # of an earlier export
            return
        who = f"exported student ({student.weights.dtype}) after {step} updates"
        show = lambda: executor.show_exported(directory.resolve(), self._requests(), None)  # noqa: E731
        self._show(EXPORTED, who, executor, show)

    def _show(
        self, name: str, who: str, executor: GroupExecutor, show: Callable[[], tuple[Any, Any]]
    ) -> Mapping[str, float]:
        with executor.spans.span("pictures", group="rollout"):
            shown, numbers = show()
            self._files(lambda: atomic_write_text(self.directory / name, written(who, shown)))
        measured: Mapping[str, float] = numbers
        return measured

    def _requests(self) -> list[RolloutRequest]:
        return [
            RolloutRequest(prompt, prompt, seeds.derive(self.args.seed, "pictures", prompt))
            for prompt in range(self.count)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Nothing: no number here is relative to an earlier one."""
        return {"of": "", "reference": {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def written(who: str, shown: Sequence[tuple[str, str]]) -> str:
    """Pairs of prompt and response, one below the other."""
    rows = [f"--- prompt {number}\n{prompt}\n>>> response\n{said}\n" for number, (prompt, said) in enumerate(shown)]
    return "\n".join([f"{who}, at temperature 1\n", *rows])
