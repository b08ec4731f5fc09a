"""The student's loss on the tokens that it sampled, and the teacher's scores of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from miles_dmd.contracts.loss import LossOutput
from miles_dmd.equations.tokens import token_loss
from miles_dmd.losses.resopd import Options
from miles_dmd.losses.resopd.observed import METRICS
from miles_dmd.losses.resopd.payload import Scores, teacher_scores_of
from miles_dmd.modalities.language.batch import TokenBatch
from miles_dmd.modalities.language.model import LanguageModel
from miles_dmd.modalities.language.scores import teacher_scores

if TYPE_CHECKING:
    from miles_dmd.contracts.loss import Objective, Scorer

OVERLAP_ROWS = 64
"""Tokens of a micro-batch at which the student's own head is looked up: it costs a pass over the vocabulary."""


def student_loss(
    models: Mapping[str, LanguageModel],
    batch: TokenBatch,
    external: Mapping[str, Mapping[str, Tensor]],
    options: Options,
) -> LossOutput:
    """Mean over the valid tokens of the micro-batch of the loss --opd-loss, on the payload of the group teacher."""
    logits = models["student"].response_logits(batch)
    scores = teacher_scores_of(batch, external.get("teacher"), top_k=options.opd_top_k, vocabulary=logits.shape[1])
    sampled = batch.logprobs[batch.mask]
    own, weight = _observed(logits, scores), None
    if options.opd_importance_cap is not None:
        weight = (own - sampled).exp().clamp_max(options.opd_importance_cap)
    loss, rows = token_loss(
        options.opd_loss,
        logits,
        scores.head_ids,
        scores.head_logprobs,
        scores.observed_ids,
        scores.observed_logprobs,
        teacher_tail_logprob=scores.tail_logprobs,
        residual_baseline=options.opd_residual_baseline,
        importance_weight=weight,
    )
    rows |= {
        "observed_score_gap": _score_gap(scores),
        "rollout_drift": (own - sampled).abs(),
        "importance_weight": torch.ones_like(own) if weight is None else weight,
        "overlap": _overlap(logits, scores.head_ids),
    }
    means = {f"opd/{name}": value.mean() for name, value in rows.items()}
    nonfinite = (~loss.detach().isfinite()).sum()
    nothing = loss.new_zeros(())
    return LossOutput(loss.mean(), {name: means.get(name, nothing) for name in METRICS}, nonfinite)


def score(models: Mapping[str, LanguageModel], batch: TokenBatch, options: Options) -> dict[str, Tensor]:
    """The teacher's likeliest tokens, the sampled one and the mass of the others, at every response position."""
    return teacher_scores(models["teacher_score"], batch, options.opd_top_k)


@torch.no_grad()
def _observed(logits: Tensor, scores: Scores) -> Tensor:
    """[N] fp32: log-prob of the sampled token under the student that trains, row by row, so that no chunk is kept."""
    own = logits.detach().gather(1, scores.observed_ids[:, None])[:, 0].float()
    return own - torch.stack([row.float().logsumexp(0) for row in logits.detach()])


def _score_gap(scores: Scores) -> Tensor:
    """[N]: difference of the teacher's two scores of the sampled token, 0 where it is not in the head."""
    return torch.where(scores.in_head, scores.head_logprobs - scores.observed_logprobs[:, None], 0.0).abs().sum(1)


@torch.no_grad()
def _overlap(logits: Tensor, head_ids: Tensor) -> Tensor:
    """[n]: share of the teacher's head that is in the student's, of the first tokens."""
    some, theirs = logits[:OVERLAP_ROWS], head_ids[:OVERLAP_ROWS]
    ours = some.topk(theirs.shape[1], dim=-1).indices
    return (theirs[:, :, None] == ours[:, None, :]).any(2).float().mean(1)


if TYPE_CHECKING:  # mypy compares what the loss type names as text
    _student_loss: Objective = student_loss
    _score: Scorer = score
