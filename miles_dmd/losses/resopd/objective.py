"""The student's loss on the teacher's scores of its own tokens, and the teacher's scorer. All arithmetic is fp32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from miles_dmd.contracts.loss import LossOutput
from miles_dmd.equations import tokens
from miles_dmd.equations.buckets import Buckets, bucket_logprobs
from miles_dmd.losses.resopd import Options
from miles_dmd.losses.resopd.payload import Scores, teacher_scores_of
from miles_dmd.modalities.language.batch import TokenBatch
from miles_dmd.modalities.language.model import LanguageModel
from miles_dmd.modalities.language.scores import teacher_scores
from miles_dmd.modalities.language.served_teacher import connected

if TYPE_CHECKING:
    from miles_dmd.contracts.loss import Objective, Scorer


def student_loss(
    models: Mapping[str, LanguageModel],
    batch: TokenBatch,
    external: Mapping[str, Mapping[str, Tensor]],
    options: Options,
) -> LossOutput:
    """Mean over the valid response tokens of the loss that --opd-loss names.

    Raises ScoresError for scores that cannot be the teacher's of these tokens.
    """
    logits = models["student"].response_logits(batch)
    told = teacher_scores_of(batch, external.get("teacher"), top_k=options.opd_top_k, vocabulary=logits.shape[-1])
    student = bucket_logprobs(logits, told.head_ids, told.observed_ids)
    teacher = Buckets(told.head_logprobs, told.tail_logprobs, told.observed_logprobs)
    hit = told.in_head.any(1)
    drift = student.observed.detach() - batch.logprobs[batch.mask]
    weight = None if options.opd_importance_cap is None else drift.exp().clamp(max=options.opd_importance_cap)
    losses = tokens.LOSSES[options.opd_loss](
        student, teacher, hit, residual_baseline=options.opd_residual_baseline, importance_weight=weight
    )
    with torch.no_grad():
        own = tokens.token_metrics(student, teacher, hit, importance_weight=weight)
        rows = {
            "loss": losses,
            **{f"opd/{name}": value for name, value in own.items()},
            "opd/overlap": tokens.head_overlap(logits, told.head_ids),
            "opd/observed_score_gap": _score_gap(told),
            "opd/rollout_drift": drift.abs(),
            "opd/importance_weight": torch.ones_like(drift) if weight is None else weight,
        }
        metrics = {name: value.float().mean() for name, value in rows.items()}
    return LossOutput(losses.mean(), metrics, _count_nonfinite(losses))


def _score_gap(told: Scores) -> Tensor:
    """[N]: difference between two scores that the teacher gives one token; 0 where that is not in the head."""
    in_head = told.head_logprobs.where(told.in_head, 0).sum(1)
    return (told.observed_logprobs - in_head).abs().where(told.in_head.any(1), 0)


def _count_nonfinite(value: Tensor) -> Tensor:
    return (~torch.isfinite(value.detach())).sum()


@torch.no_grad()
def score(models: Mapping[str, LanguageModel], batch: TokenBatch, options: Options) -> Mapping[str, Tensor]:
    """Scores of the teacher, from its weights here or from the servers that hold it; see the modality's
    ``teacher_scores``. Raises EngineError for a sample that no server scores."""
    if options.opd_teacher_url:
        return connected(options.opd_teacher_url, options.opd_top_k).score(batch)
    return teacher_scores(models["teacher_score"], batch, options.opd_top_k)


if TYPE_CHECKING:  # mypy compares what the loss type names as text
    _objectives: tuple[Objective, ...] = (student_loss,)
    _scorer: Scorer = score
