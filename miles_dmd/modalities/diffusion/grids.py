"""Sample grids: pictures after committed student steps and at both ends of a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_dmd import seeds
from miles_dmd.files import atomic_write_text
from miles_dmd.modalities.diffusion.distillation import Distillation
from miles_dmd.modalities.diffusion.options import diffusion_options
from miles_dmd.modalities.diffusion.requests import DenoisingRequest
from miles_dmd.observe.best_effort import BestEffort
from miles_dmd.observe.pictures import sample_grid
from miles_dmd.plan import TrainerCounters

if TYPE_CHECKING:
    from miles_dmd.config.args import Args
    from miles_dmd.contracts.modality import Report
    from miles_dmd.executor import GroupExecutor
    from miles_dmd.modalities.diffusion.statistics import SampleStatistics
    from miles_dmd.preflight.resolved import ResolvedRun

SEEDS_PER_PROMPT = 8
TEACHER = "teacher.png"
EXPORTED = "exported.png"


def sample_grids(run: ResolvedRun, texts: Sequence[str], directory: Path, report: Report) -> SampleGrids:
    """The grids of a run."""
    return SampleGrids(run.args, texts, directory, run.teacher_sampling, report)


class SampleGrids:
    """A grid of samples of the student's moving average, always with the same noise, so that grids can be compared, and
    first of all one of the teacher, sampled as ``teacher`` says (nothing: a loss without one to sample from).

    ``report`` hears what the student's latents say: ``samples/diversity``, relative to the teacher's, and
    ``samples/saturation``, the share beyond the teacher's range. Without a teacher the first grid stands for it.
    """

    def __init__(
        self,
        args: Args,
        texts: Sequence[str],
        directory: Path,
        teacher: Mapping[str, Any],
        report: Callable[[Mapping[str, float]], None] = lambda metrics: None,
    ) -> None:
        self.args, self.directory, self.teacher, self.report = args, directory, teacher, report
        self.texts = texts[: args.sample_prompts]
        self._drawn: int | None = None
        self._files = BestEffort("a grid of samples", each=True)
        self._reference: dict[str, float] = {}
        about = [self.texts, dict(teacher), SEEDS_PER_PROMPT]
        self._of = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
        """Fingerprint of the reference's inputs: other prompts or another guidance need another reference."""

    def after_completed_step(
        self, counters: TrainerCounters, metrics: Mapping[str, Any], executor: GroupExecutor
    ) -> None:
        last = counters.global_step == self.args.num_rollout
        if last or counters.global_step % self.args.sample_interval == 0:
            self.draw(counters.global_step, executor)

    def draw_teacher(self, executor: GroupExecutor) -> None:
        """Sample the teacher's reference grid, unless that is known and lies here."""
        known = self._reference and (self.directory / TEACHER).is_file()
        if self.texts and self.teacher and not known:
            print(f"Drawing {len(self._requests())} samples of the teacher, unless they are kept ...", flush=True)
            with executor.spans.span("pictures", group="rollout"):
                images, measured = executor.show_teacher(self._requests(), self.teacher)
                self._remember({"spread": measured.spread, "limit": measured.limit})
                how = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in self.teacher.items())
                self._grid(TEACHER, images, f"teacher: {how}")

    def finish(self, counters: TrainerCounters, executor: GroupExecutor) -> None:
        """The grid of what is exported, also where a run ended before its last step."""
        if self._drawn != counters.global_step:
            self.draw(counters.global_step, executor)

    def draw_exported(self, directory: Path, student: Distillation, step: int, executor: GroupExecutor) -> None:
        """A grid of what ``directory`` holds, where rounding has made it another student than the average."""
        report = student.weights
        if not self.texts or report is None or report.change_kept == 1:
            if (self.directory / EXPORTED).exists():  # of an earlier export of this run
                self._files(lambda: (self.directory / EXPORTED).unlink())
            return
        with executor.spans.span("pictures", group="rollout"):
            limit = self._reference.get("limit")
            images, _ = executor.show_exported(directory.resolve(), self._requests(), limit)
            self._grid(EXPORTED, images, f"exported student ({report.dtype}) after {step} updates")

    def draw(self, step: int, executor: GroupExecutor) -> None:
        if not self.texts:
            return
        self._drawn = step
        with executor.spans.span("pictures", group="rollout"):
            limit = self._reference.get("limit")
            images, measured = executor.show_student(self._requests(), limit)
            self._report_statistics(measured)
            steps = diffusion_options(self.args).num_inference_steps
            who = "student (moving average)" if executor.averages else "student"
            self._grid(f"step_{step:06d}.png", images, f"{who} after {step} updates, {steps} steps")

    def _grid(self, name: str, images: Any, title: str) -> None:
        labels = [text if column == 0 else "" for text in self.texts for column in range(SEEDS_PER_PROMPT)]
        place = self.directory / name
        self._files(lambda: sample_grid(images, place, labels=labels, columns=SEEDS_PER_PROMPT, title=title))

    def _report_statistics(self, measured: SampleStatistics) -> None:
        if not self._reference:
            self._remember({"spread": measured.spread, "limit": measured.limit})
        spread = self._reference["spread"]
        diversity = {"samples/diversity": measured.spread / spread} if spread > 0 else {}
        self.report({**diversity, "samples/saturation": measured.saturation})

    def _remember(self, reference: Mapping[str, float]) -> None:
        """Keep and write the reference of later grids; the file is for readers."""
        self._reference = dict(reference)
        if reference:
            text = json.dumps(self._reference) + "\n"
            self._files(lambda: atomic_write_text(self.directory / "reference.json", text))

    def state_dict(self) -> dict[str, Any]:
        return {"of": self._of, "reference": self._reference}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["of"] == self._of:
            self._remember(state["reference"])

    def _requests(self) -> list[DenoisingRequest]:
        return [
            DenoisingRequest(
                sample_id=prompt * SEEDS_PER_PROMPT + column,
                prompt_id=prompt,
                seed=seeds.derive(self.args.seed, "pictures", prompt, column),
                stop_step=diffusion_options(self.args).num_inference_steps - 1,
            )
            for prompt in range(len(self.texts))
            for column in range(SEEDS_PER_PROMPT)
        ]
