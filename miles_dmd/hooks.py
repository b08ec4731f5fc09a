"""What happens after a committed student step, and at the two ends of a run: sample grids, and exported students."""

from __future__ import annotations

import json
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
from miles_dmd.errors import MilesDmdError
from miles_dmd.executor import GroupExecutor
from miles_dmd.files import atomic_write_text
from miles_dmd.observe.pictures import sample_grid
from miles_dmd.plan import TrainerCounters
from miles_dmd.plan.grid import sigma_grid

SEEDS_PER_PROMPT = 8


class SampleGrids:
    """A grid of samples of the student's moving average, always with the same noise, so that grids can be compared.

    ``report`` hears what their latents say: ``samples/diversity``, relative to the first grid, and
    ``samples/saturation``, the share beyond the range of the first grid. What that was stays in reference.json.
    """

    def __init__(
        self,
        args: Any,
        texts: Sequence[str],
        directory: Path,
        report: Callable[[Mapping[str, float]], None] = lambda metrics: None,
    ) -> None:
        self.args, self.directory, self.report = args, directory, report
        self.texts = texts[: args.sample_prompts]
        self._drawn: int | None = None

    def after_completed_step(
        self, counters: TrainerCounters, metrics: Mapping[str, Any], executor: GroupExecutor
    ) -> None:
        last = counters.global_step == self.args.num_rollout
        if last or counters.global_step % self.args.sample_interval == 0:
            self.draw(counters.global_step, executor)

    def finish(self, counters: TrainerCounters, executor: GroupExecutor) -> None:
        """The grid of what is exported, also where a run ended before its last step."""
        if self._drawn != counters.global_step:
            self.draw(counters.global_step, executor)

    def draw(self, step: int, executor: GroupExecutor) -> None:
        if not self.texts:
            return
        self._drawn = step
        with executor.spans.span("pictures", group="rollout"):
            reference = self._reference()
            limit = reference.get("limit")
            images, told = executor.with_averaged_weights(lambda: executor.rollouts.pictures(self._requests(), limit))
            self._tell(told, reference)
            sample_grid(
                images,
                self.directory / f"step_{step:06d}.png",
                labels=[text if column == 0 else "" for text in self.texts for column in range(SEEDS_PER_PROMPT)],
                columns=SEEDS_PER_PROMPT,
                title=f"student (moving average) after {step} updates, {self.args.num_inference_steps} steps",
            )

    def _reference(self) -> dict[str, float]:
        """Of the run's first grid; empty before it."""
        path = self.directory / "reference.json"
        return dict(json.loads(path.read_text())) if path.is_file() else {}

    def _tell(self, told: SampleStatistics, reference: Mapping[str, float]) -> None:
        if not reference:
            reference = {"spread": told.spread, "limit": told.limit}
            self.directory.mkdir(parents=True, exist_ok=True)
            atomic_write_text(self.directory / "reference.json", json.dumps(reference) + "\n")
        diversity = {"samples/diversity": told.spread / reference["spread"]} if reference["spread"] > 0 else {}
        self.report({**diversity, "samples/saturation": told.saturation})

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
    one lucky batch is not the best student. best.json in ``directory`` tells metric, value and step.
    """

    def __init__(self, args: Any, loss_type: LossType, directory: Path) -> None:
        self.args, self.loss_type, self.directory = args, loss_type, directory
        asked: str = args.keep_best or ""
        self.way, _, self.metric = asked.partition(":")
        self._values: list[float] = []

    def committed(self, row: Mapping[str, float], executor: GroupExecutor) -> None:
        """``row`` holds the metrics of a committed cycle."""
        step = int(row["global_step"])
        if not self.metric or step == 0:
            return
        if self.metric in row:
            self._values.append(row[self.metric])
        if step % self.args.sample_interval and step != self.args.num_rollout:
            return
        if not self._values:
            raise MilesDmdError(
                f"--keep-best {self.args.keep_best}: no such metric; there are {', '.join(sorted(row))}"
            )
        value, self._values = math.fsum(self._values) / len(self._values), []
        if self._is_better(value):
            self._keep(value, step, executor)

    def _is_better(self, value: float) -> bool:
        path = self.directory / "best.json"
        best = json.loads(path.read_text())["value"] if path.is_file() else None
        if not math.isfinite(value) or best is None:
            return math.isfinite(value)
        return bool(value < best if self.way == "min" else value > best)

    def _keep(self, value: float, step: int, executor: GroupExecutor) -> None:
        """The new one is whole before the old one goes; a run that dies between the two renames has both, by names."""
        new, old = (self.directory.with_name(f"{self.directory.name}.{age}") for age in ("new", "old"))
        shutil.rmtree(new, ignore_errors=True)
        export_student(self.args, self.loss_type, executor, new)
        best = {"metric": self.metric, "value": value, "global_step": step}
        atomic_write_text(new / "best.json", json.dumps(best) + "\n")
        shutil.rmtree(old, ignore_errors=True)
        if self.directory.exists():
            self.directory.rename(old)
        new.rename(self.directory)
        shutil.rmtree(old, ignore_errors=True)


def describe(args: Any, loss_type: LossType, policy_version: int) -> Distillation:
    """How student and teacher are sampled by the stock pipeline."""
    family = registry.load("models", args.model_family)
    checkpoint = Path(args.hf_checkpoint)
    height, width = family.default_pixels(checkpoint)
    common = {
        "max_sequence_length": args.max_sequence_length or family.default_max_sequence_length(checkpoint),
        "height": args.height or height,
        "width": args.width or width,
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
