"""What happens after a committed student step, and at the two ends of a run: sample grids, and exported students."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_dmd import registry, seeds
from miles_dmd.contracts.distillation import Distillation
from miles_dmd.contracts.engine import RolloutRequest
from miles_dmd.contracts.loss import LossType
from miles_dmd.contracts.reports import SampleStatistics
from miles_dmd.executor import GroupExecutor
from miles_dmd.files import atomic_write_text, recover_directory, replace_directory
from miles_dmd.observe.pictures import sample_grid
from miles_dmd.plan import TrainerCounters
from miles_dmd.plan.grid import sigma_grid

logger = logging.getLogger(__name__)

SEEDS_PER_PROMPT = 8
TEACHER = "teacher.png"
BEST_STUDENT = "student_best"
BEST = "best.json"


class SampleGrids:
    """A grid of samples of the student's moving average, always with the same noise, so that grids can be compared, and
    first of all one of the teacher, sampled as ``teacher`` says (nothing: a loss without one to sample from).

    ``report`` hears what the student's latents say: ``samples/diversity``, relative to the teacher's, and
    ``samples/saturation``, the share beyond the teacher's range. Without a teacher the first grid stands for it.
    """

    def __init__(
        self,
        args: Any,
        texts: Sequence[str],
        directory: Path,
        teacher: Mapping[str, Any],
        report: Callable[[Mapping[str, float]], None] = lambda metrics: None,
    ) -> None:
        self.args, self.directory, self.teacher, self.report = args, directory, teacher, report
        self.texts = texts[: args.sample_prompts]
        self._drawn: int | None = None
        self._reference: dict[str, float] = {}
        about = [self.texts, dict(teacher), SEEDS_PER_PROMPT]
        self._of = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
        """Of what the reference is: a run that goes on with other prompts or another guidance needs another one."""

    def after_completed_step(
        self, counters: TrainerCounters, metrics: Mapping[str, Any], executor: GroupExecutor
    ) -> None:
        last = counters.global_step == self.args.num_rollout
        if last or counters.global_step % self.args.sample_interval == 0:
            self.draw(counters.global_step, executor)

    def draw_teacher(self, executor: GroupExecutor) -> None:
        """What the student's grids are compared with, unless that is known and lies here."""
        known = self._reference and (self.directory / TEACHER).is_file()
        if self.texts and self.teacher and not known:
            print(f"Drawing {len(self._requests())} samples of the teacher, unless they are kept ...", flush=True)
            with executor.spans.span("pictures", group="rollout"):
                images, told = executor.sampling().teacher_pictures(self._requests(), self.teacher)
                self._remember({"spread": told.spread, "limit": told.limit})
                how = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in self.teacher.items())
                self._grid(TEACHER, images, f"teacher: {how}")

    def finish(self, counters: TrainerCounters, executor: GroupExecutor) -> None:
        """The grid of what is exported, also where a run ended before its last step."""
        if self._drawn != counters.global_step:
            self.draw(counters.global_step, executor)

    def draw(self, step: int, executor: GroupExecutor) -> None:
        if not self.texts:
            return
        self._drawn = step
        with executor.spans.span("pictures", group="rollout"):
            limit = self._reference.get("limit")
            images, told = executor.with_averaged_weights(lambda: executor.rollouts.pictures(self._requests(), limit))
            self._tell(told)
            steps = self.args.num_inference_steps
            self._grid(f"step_{step:06d}.png", images, f"student (moving average) after {step} updates, {steps} steps")

    def _grid(self, name: str, images: Any, title: str) -> None:
        sample_grid(
            images,
            self.directory / name,
            labels=[text if column == 0 else "" for text in self.texts for column in range(SEEDS_PER_PROMPT)],
            columns=SEEDS_PER_PROMPT,
            title=title,
        )

    def _tell(self, told: SampleStatistics) -> None:
        if not self._reference:
            self._remember({"spread": told.spread, "limit": told.limit})
        spread = self._reference["spread"]
        diversity = {"samples/diversity": told.spread / spread} if spread > 0 else {}
        self.report({**diversity, "samples/saturation": told.saturation})

    def _remember(self, reference: Mapping[str, float]) -> None:
        """What later grids are compared with; the file is for readers."""
        self._reference = dict(reference)
        if reference:
            self.directory.mkdir(parents=True, exist_ok=True)
            atomic_write_text(self.directory / "reference.json", json.dumps(self._reference) + "\n")

    def state_dict(self) -> dict[str, Any]:
        return {"of": self._of, "reference": self._reference}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["of"] == self._of:
            self._remember(state["reference"])

    def _requests(self) -> list[RolloutRequest]:
        return [
            RolloutRequest(
                sample_id=prompt * SEEDS_PER_PROMPT + column,
                prompt_id=prompt,
                seed=seeds.derive(self.args.seed, "pictures", prompt, column),
                stop_step=self.args.num_inference_steps - 1,
            )
            for prompt in range(len(self.texts))
            for column in range(SEEDS_PER_PROMPT)
        ]


def export_student(args: Any, loss_type: LossType, executor: GroupExecutor, directory: Path) -> None:
    """The moving average as a pipeline directory that opens in stock diffusers, with distillation.json."""
    with executor.spans.span("save", group="rollout"):
        student = executor.groups[executor.plan.group_of("student")]
        weights = student.weights(averaged=executor.plan.export.role == "student_ema")
        # absolute: the worker that writes it may have been started elsewhere
        executor.rollouts.export(directory.resolve(), weights, describe(args, loss_type, executor.policy_version))


class KeepBest:
    """The best student so far in ``directory``, beside the last: --keep-best says by which metric, and which way.

    Every --sample-interval student steps and after the last it judges the metric's mean since it last judged, so that
    one lucky batch is not the best student. best.json in ``directory`` tells metric, value and step. A run that goes on
    from one in another directory takes its best student over from ``earlier``.
    """

    def __init__(self, args: Any, loss_type: LossType, directory: Path, earlier: Path | None = None) -> None:
        self.args, self.loss_type, self.directory, self.earlier = args, loss_type, directory, earlier
        asked: str = args.keep_best or ""
        self.way, _, self.metric = asked.partition(":")
        self._values: list[float] = []
        self._best: dict[str, Any] = {}
        """What best.json says."""
        self._new = directory.with_name(f"{directory.name}.new")
        recover_directory(directory)
        shutil.rmtree(self._new, ignore_errors=True)  # of a process that died before it was whole, or after its turn

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
        self._replace(best, lambda new: export_student(self.args, self.loss_type, executor, new))
        self._best = best

    def _replace(self, best: Mapping[str, Any], write: Callable[[Path], object]) -> None:
        """The new one is whole before the old one goes."""
        shutil.rmtree(self._new, ignore_errors=True)
        write(self._new)
        atomic_write_text(self._new / BEST, json.dumps(best) + "\n")
        replace_directory(self._new, self.directory)

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
            self._replace(self._best, lambda new: shutil.copytree(earlier, new, symlinks=True))
            return
        logger.warning(
            "%s: the best student so far (%s %.6g after step %d) is not kept any more; the next has to beat it",
            self.directory, self.metric, self._best["value"], self._best["global_step"],
        )  # fmt: skip


def read_best(directory: Path) -> dict[str, Any]:
    """What best.json in ``directory`` says; empty where there is none."""
    try:
        return dict(json.loads((directory / BEST).read_text()))
    except (OSError, ValueError):
        return {}


def describe(args: Any, loss_type: LossType, policy_version: int) -> Distillation:
    """How student and teacher are sampled by the stock pipeline."""
    family = registry.load("models", args.model_family)
    checkpoint = Path(args.hf_checkpoint)
    height, width = family.resolution(args)
    common = {
        "max_sequence_length": args.max_sequence_length or family.default_max_sequence_length(checkpoint),
        "height": height,
        "width": width,
    }
    negative = {"negative_prompt": args.negative_prompt} if args.negative_prompt else {}
    steps = args.num_inference_steps
    # the pipeline shifts what it is given, once, so it is given the grid before the shift
    student = {"num_inference_steps": steps, "guidance_scale": 1.0, "sigmas": list(sigma_grid(steps, 1.0)), **common}
    return Distillation(
        sigmas=sigma_grid(steps, args.shift),
        solver=args.solver,
        teacher=str(Path(args.teacher_path).resolve()),  # so that it is found from any directory
        policy_version=policy_version,
        student_call=student,
        teacher_call={**loss_type.teacher_sampling(args), **common, **negative},
    )
