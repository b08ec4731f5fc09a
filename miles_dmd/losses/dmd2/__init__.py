"""DMD2 without its GAN: fake score and distribution matching.

A fake score follows the student's distribution, and the student moves towards the teacher's.

Yin et al. 2024, "Improved Distribution Matching Distillation for Fast Image Synthesis" (arXiv 2405.14867), section 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from miles_dmd.config.trainers import compute_trainer_args, compute_trainer_configs
from miles_dmd.config.values import Guidance, Natural, NonNegative, Repeats, Shift, Steps
from miles_dmd.contracts.loss import LossType
from miles_dmd.errors import ConfigError
from miles_dmd.losses.dmd2.names import NESTED, NOT_BUILT, OTHER_GROUPS, OTHER_NAMES
from miles_dmd.losses.dmd2.observed import ALARMS, HEADLINE, PANELS
from miles_dmd.modalities.diffusion.family import diffusion_family
from miles_dmd.modalities.diffusion.options import diffusion_options
from miles_dmd.plan import DistillationPlan, build_plan
from miles_dmd.shown import short_repr

if TYPE_CHECKING:
    from miles_dmd.config.args import Args

CAPABILITIES = frozenset({"distribution_matching"})


@dataclass(frozen=True, kw_only=True)
class Options:
    fake_update_ratio: Repeats = 5
    """Fake-score updates for every update of the student (DMD2's two time-scale rule: 5)."""
    fake_warmup_cycles: Natural = 1
    """Cycles before the first in which only the fake score trains: it starts as the teacher, so that without guidance
    the first student gradient would be exactly zero."""
    teacher_guidance: Guidance = 4.0
    """Guidance scale s of the teacher's score, standard form: uncond + s * (cond - uncond); 1 is no guidance. CausVid's
    and Self-Forcing's w, in cond + w * (cond - uncond), is s - 1: their 3.0 is 4.0 here."""
    dm_sigma_min: float = 0.02
    """Least noise at which teacher and fake score are compared; the law is truncated there, never clamped."""
    dm_sigma_max: float = 0.98
    """Most noise at which teacher and fake score are compared."""
    dm_shift: Shift = 1.0
    """Timestep shift of the noise law of that comparison; 1 is uniform, as in DMD2, and larger is noisier."""
    fake_shift: Shift = 1.0
    """Timestep shift of the noise law under which the fake score trains, over the full range [0, 1]."""
    teacher_num_inference_steps: Steps = 28
    """Steps of the teacher's own sampling, as the exported distillation.json records it; does not affect training."""
    normalizer_floor: float = 1e-5
    """Least value of the per-sample normaliser mean|x_gen - x0_teacher|, which would otherwise divide by zero."""
    alarm_critic_lag: NonNegative = 3.0
    """Alarm when the gap between teacher and fake score is by this factor larger than it was early on; 0: never."""
    alarm_critic_loss_slope: NonNegative = 0.5
    """Alarm when the fake score's loss rises by this share of its mean within --alarm-window; 0: never."""
    alarm_rollout_drift: NonNegative = 0.1
    """Alarm when engine and actor differ by this share of the samples' standard deviation; 0: never."""


def plan(args: Args) -> DistillationPlan:
    options: Options = args.loss_options
    (actor,) = (trainer for trainer in compute_trainer_configs(args) if trainer.role == "actor")
    config = {
        "model_path": args.hf_checkpoint,
        "actor_model_path": compute_trainer_args(args, actor).hf_checkpoint,
        "critic_model_path": args.teacher_path,
        "fake_update_ratio": options.fake_update_ratio,
        "fake_warmup_cycles": options.fake_warmup_cycles,
        "role_storage": "actor_critic",
        "rollout_strategy": {"renoise": "consistency_renoise", "euler": "ode_euler"}[diffusion_options(args).solver],
    }
    return build_plan("dmd2", config, CAPABILITIES)


def teacher_sampling(args: Args) -> dict[str, Any]:
    options: Options = args.loss_options
    return {
        "num_inference_steps": options.teacher_num_inference_steps,
        "guidance_scale": options.teacher_guidance,
    }


def check(args: Args) -> None:
    options: Options = args.loss_options
    if options.teacher_guidance > 1 and not diffusion_family(args).can_guide:
        raise ConfigError(
            f"--teacher-guidance {options.teacher_guidance} needs an unconditional branch, and --model-family "
            f"{args.model_family} has none; pass --teacher-guidance 1"
        )
    if options.teacher_guidance == 1 and (negative := diffusion_options(args).negative_prompt):
        raise ConfigError(
            f"--negative-prompt {short_repr(negative)} is the text of the teacher's unconditional branch, "
            "which --teacher-guidance 1 leaves out; pass a guidance above 1, or --negative-prompt ''"
        )
    if not 0 < options.dm_sigma_min < options.dm_sigma_max < 1:
        raise ConfigError(
            f"--dm-sigma-min {options.dm_sigma_min} and --dm-sigma-max {options.dm_sigma_max} must satisfy "
            "0 < min < max < 1; the published bounds are 0.02 and 0.98"
        )
    if options.normalizer_floor <= 0:
        raise ConfigError(f"--normalizer-floor {options.normalizer_floor} must be above 0; the default is 1e-5")


loss_type = LossType(
    options=Options,
    roles=("critic", "actor"),
    plan=plan,
    objectives={
        "student": "miles_dmd.losses.dmd2.objective:generator_loss",
        "fake_score": "miles_dmd.losses.dmd2.objective:fake_score_loss",
    },
    capabilities=CAPABILITIES,
    scorers={"critic": "miles_dmd.losses.dmd2.objective:score"},
    tells={"critic": ("teacher_clean", "critic_clean", "score_sigma")},
    needs={"student": {"critic": ("teacher_clean", "critic_clean", "score_sigma")}},
    metrics={
        "student": (
            "teacher_critic_gap",
            "normalizer",
            "rollout_drift",
            "score_sigma",
            "generated_mean",
            "generated_std",
            "teacher_clean_mean",
            "teacher_clean_std",
            "critic_clean_mean",
            "critic_clean_std",
        )
    },
    run_wide=frozenset({"fake_update_ratio", "fake_warmup_cycles", "teacher_num_inference_steps", "teacher_guidance"}),
    readers={
        **dict.fromkeys(("dm_sigma_min", "dm_sigma_max", "dm_shift", "fake_shift"), ("critic",)),
        "normalizer_floor": ("actor",),
    },
    teacher_sampling=teacher_sampling,
    alarms=ALARMS,
    panels=PANELS,
    headline=HEADLINE,
    other_names=OTHER_NAMES,
    other_groups=OTHER_GROUPS,
    not_built=NOT_BUILT,
    nested=NESTED,
    check=check,
)
