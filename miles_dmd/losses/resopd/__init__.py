"""On-policy distillation of language models: ResOPD, and two losses on the same numbers.

The student samples; a frozen teacher group tells its top-k tokens, the token that was sampled and the mass of all
others at every position; the student descends an unbiased estimate of the reverse KL from it to the teacher.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from miles_dmd.config.trainers import compute_trainer_args, compute_trainer_configs
from miles_dmd.config.values import LARGEST, Count, NonNegative, Range
from miles_dmd.contracts.loss import LossType
from miles_dmd.errors import ConfigError
from miles_dmd.losses.resopd.checks import check_options, check_top_k
from miles_dmd.losses.resopd.names import NESTED, NOT_BUILT, OTHER_NAMES
from miles_dmd.losses.resopd.observed import ALARMS, HEADLINE, METRICS, PANELS
from miles_dmd.plan import DistillationPlan, build_plan

if TYPE_CHECKING:
    from miles_dmd.config.args import Args

CAPABILITIES = frozenset({"token_matching"})
TOLD = ("head_ids", "head_logprobs", "observed_logprobs", "tail_logprobs")
SERVED = "served"
"""The model of a teacher that a server holds, in a plan: the address may change from one start to the next."""


@dataclass(frozen=True, kw_only=True)
class Options:
    opd_loss: Literal["resopd", "forward_kl_topk_tail", "sampled_k2"] = "resopd"
    """Loss of a token: resopd is the exact reverse KL over the teacher's top-k and one tail, and a sampled residual
    within the tail; forward_kl_topk_tail the forward KL over the same; sampled_k2 the sampled token's squared
    log-ratio."""
    opd_top_k: Count = 4
    """Tokens in the head: the teacher's likeliest at each position. opd/kl_coarse over opd/kl says if they are
    enough."""
    opd_residual_baseline: Literal["none", "bucket"] = "none"
    """Baseline of ResOPD's residual: none is the published form; bucket subtracts the tail's log-ratio, which is as
    unbiased and has less variance where student and teacher are near."""
    opd_importance_cap: Annotated[float, Range(1, LARGEST)] | None = None
    """Weigh what is sampled by the ratio of the trainer's probability to the engine's, at most this; by default there
    is no weight. For engines whose numbers differ from the trainer's."""
    opd_teacher_url: tuple[str, ...] = ()
    """SGLang servers that hold the teacher, such as http://127.0.0.1:30000, instead of --teacher-checkpoint."""
    alarm_on_policy: NonNegative = 6.0
    """Alarm when sampled tokens hit the head so many standard deviations more or less often than the student's own
    probabilities say: they are not the student's, or misaligned; 0: never."""
    alarm_head_mass: NonNegative = 0.5
    """Alarm when the student's mass on the teacher's head falls below this share of what it was early on; 0: never."""
    alarm_kl: NonNegative = 2.0
    """Alarm when the coarse KL is by this factor larger than it was early on; 0: never."""


def plan(args: Args) -> DistillationPlan:
    """Raises ConfigError unless there is one source of the teacher's scores."""
    options: Options = args.loss_options
    if (args.teacher_checkpoint is None) == (not options.opd_teacher_url):
        raise ConfigError(
            "the teacher has exactly one source: --teacher-checkpoint DIRECTORY, or --opd-teacher-url of servers that "
            f"hold it; {'neither is' if args.teacher_checkpoint is None else 'both are'} given"
        )
    (actor,) = (trainer for trainer in compute_trainer_configs(args) if trainer.role == "actor")
    config = {
        "actor_model_path": compute_trainer_args(args, actor).hf_checkpoint,
        "teacher_model_path": args.teacher_checkpoint or SERVED,
        "opd_top_k": options.opd_top_k,
    }
    return build_plan("opd", config, CAPABILITIES)


def teacher_sampling(args: Args) -> dict[str, float]:
    """The teacher draws texts like the student where its weights are here."""
    return {} if args.teacher_checkpoint is None else {"temperature": 1.0}


def check(args: Args) -> None:
    options: Options = args.loss_options
    check_options(options, {trainer.role: trainer.overrides for trainer in args.trainers})
    check_top_k(args, options.opd_top_k)


loss_type = LossType(
    options=Options,
    modality="language",
    roles=("teacher", "actor"),
    plan=plan,
    objectives={"student": "miles_dmd.losses.resopd.objective:student_loss"},
    capabilities=CAPABILITIES,
    scorers={"teacher": "miles_dmd.losses.resopd.objective:score"},
    tells={"teacher": TOLD},
    needs={"student": {"teacher": TOLD}},
    metrics={"student": METRICS},
    run_wide=frozenset(
        {"opd_loss", "opd_top_k", "opd_residual_baseline", "opd_importance_cap", "opd_teacher_url"},
    ),
    teacher_sampling=teacher_sampling,
    alarms=ALARMS,
    panels=PANELS,
    headline=HEADLINE,
    other_names=OTHER_NAMES,
    not_built=NOT_BUILT,
    nested=NESTED,
    check=check,
    preflight="miles_dmd.losses.resopd.servers:preflight",
)
