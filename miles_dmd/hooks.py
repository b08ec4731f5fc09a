"""What happens after a committed student step, and at the two ends of a run: sample grids, and the exported student."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_dmd import registry, seeds
from miles_dmd.contracts.distillation import Distillation
from miles_dmd.contracts.engine import RolloutRequest
from miles_dmd.contracts.loss import LossType
from miles_dmd.executor import GroupExecutor
from miles_dmd.observe.pictures import sample_grid
from miles_dmd.plan import TrainerCounters
from miles_dmd.plan.grid import sigma_grid

SEEDS_PER_PROMPT = 8


class SampleGrids:
    """A grid of samples of the student's moving average, always with the same noise, so that grids can be compared."""

    def __init__(self, args: Any, texts: Sequence[str], directory: Path) -> None:
        self.args, self.directory = args, directory
        self.texts = texts[: args.sample_prompts]

    def after_completed_step(
        self, counters: TrainerCounters, metrics: Mapping[str, Any], executor: GroupExecutor
    ) -> None:
        last = counters.global_step == self.args.num_rollout
        if last or counters.global_step % self.args.sample_interval == 0:
            self.draw(counters.global_step, executor)

    def draw(self, step: int, executor: GroupExecutor) -> None:
        if not self.texts:
            return
        with executor.spans.span("pictures", group="rollout"):
            images = executor.with_averaged_weights(lambda: executor.rollouts.pictures(self._requests()))
            sample_grid(
                images,
                self.directory / f"step_{step:06d}.png",
                labels=[text if column == 0 else "" for text in self.texts for column in range(SEEDS_PER_PROMPT)],
                columns=SEEDS_PER_PROMPT,
                title=f"student (moving average) after {step} updates, {self.args.num_inference_steps} steps",
            )

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
        executor.rollouts.export(directory, weights, describe(args, loss_type, executor.policy_version))


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
    steps = args.num_inference_steps
    # the pipeline shifts what it is given, once, so it is given the grid before the shift
    student = {"num_inference_steps": steps, "guidance_scale": 1.0, "sigmas": list(sigma_grid(steps, 1.0)), **common}
    return Distillation(
        sigmas=sigma_grid(steps, args.shift),
        solver=args.solver,
        teacher=args.teacher_path,
        policy_version=policy_version,
        student_call=student,
        teacher_call={**loss_type.teacher_sampling(args), **common},
    )
