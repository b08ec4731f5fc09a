"""Losses of on-policy distillation per token: ResOPD, forward KL over head and tail, sampled k2.

Student p, teacher q, both normalised over the whole vocabulary; S the teacher's top-k (the head), everything else one
tail of mass tau; A the token that the student sampled; r = log p - log q; L = log tau_p - log tau_q.

Each loss is a function of few numbers a row, and its printed value is an estimate of a divergence, while its gradient is
that of the estimator: loss = value + surrogate - surrogate.detach().
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from miles_dmd.equations.buckets import Buckets, bucket_logprobs

FLOOR = math.log(1e-5)
"""Both tails are at least this in L. In fp32 the log of a smaller tail is noise, and L may be any number that does not
depend on A."""
Baseline = Literal["none", "bucket"]
Metrics = dict[str, Tensor]


class Tokens(NamedTuple):
    """What the losses read of N tokens; of the student with a graph, the rest without."""

    student: Buckets
    teacher: Buckets
    in_head: Tensor
    """[N] bool: the sampled token is in the head."""
    weight: Tensor
    """[N]: importance weight of what is sampled, p(A) over the probability with which A was drawn."""
    baseline: Baseline


def resopd(tokens: Tokens) -> tuple[Tensor, Tensor, Metrics]:
    """(value [N], surrogate [N], metrics): tail residualization for sparse on-policy distillation.

    Gradient: grad KL_c + 1[A not in S] w ((r_A - c) grad log p_A - (L - c) grad log tau_p), KL_c the exact reverse KL
    of head and tail, c = 0 (``none``, the published form) or L (``bucket``). Its mean over A ~ p is the gradient of
    KL(p || q) for every c and L that do not depend on A. Value: KL_c + 1[A not in S] w (r_A - L), of mean KL(p || q).
    """
    student, teacher = tokens.student, tokens.teacher
    head, tail, observed = (value.detach() for value in student)
    ratio = head - teacher.head
    tail_ratio = tail.clamp_min(FLOOR) - teacher.tail.clamp_min(FLOOR)
    gap = observed - teacher.observed
    sampled = torch.where(tokens.in_head, 0.0, tokens.weight)
    centre = tail_ratio if tokens.baseline == "bucket" else torch.zeros_like(tail_ratio)
    coarse = (head.exp() * ratio).sum(1) + tail.exp() * tail_ratio
    surrogate = (
        (head.exp() * ratio * student.head).sum(1)
        + _times(tail.exp() * tail_ratio - sampled * (tail_ratio - centre), student.tail)
        + _times(sampled * (gap - centre), student.observed)
    )
    residual = torch.where(tokens.in_head, 0.0, sampled * (gap - tail_ratio))
    metrics = {"kl_coarse": coarse, "residual": residual, "residual_abs": residual.abs(), "tail_log_ratio": tail_ratio}
    return coarse + residual, surrogate, metrics


def forward_kl_topk_tail(tokens: Tokens) -> tuple[Tensor, Tensor, Metrics]:
    """(value [N], surrogate [N], metrics): the exact forward KL of head and tail, a lower bound of KL(q || p)."""
    student, teacher = tokens.student, tokens.teacher
    mass, tail_mass = teacher.head.exp(), teacher.tail.exp()
    surrogate = -(mass * student.head).sum(1) - _times(tail_mass, student.tail)
    value = (mass * teacher.head).sum(1) + _times(tail_mass, teacher.tail) + surrogate.detach()
    return value, surrogate, {}


def sampled_k2(tokens: Tokens) -> tuple[Tensor, Tensor, Metrics]:
    """(value [N], surrogate [N], metrics): half the squared log-ratio of the sampled token, times its weight.

    Its expected gradient under A ~ p is that of KL(p || q); its value is not.
    """
    gap = tokens.student.observed.detach() - tokens.teacher.observed
    return tokens.weight * gap.square() / 2, tokens.weight * gap * tokens.student.observed, {}


LOSSES: Mapping[str, Callable[[Tokens], tuple[Tensor, Tensor, Metrics]]] = {
    "resopd": resopd,
    "forward_kl_topk_tail": forward_kl_topk_tail,
    "sampled_k2": sampled_k2,
}
"""name -> loss of N tokens."""


def _times(factor: Tensor, logs: Tensor) -> Tensor:
    """``factor * logs``, 0 where ``factor`` is 0: an empty tail has a log of -inf and no gradient."""
    idle = factor == 0
    return torch.where(idle, 0.0, factor) * torch.where(idle, 0.0, logs)


def token_loss(
    name: str,
    student_logits: Tensor,
    head_ids: Tensor,
    head_logprobs: Tensor,
    observed_ids: Tensor,
    observed_logprobs: Tensor,
    mask: Tensor | None = None,
    *,
    teacher_tail_logprob: Tensor | None = None,
    residual_baseline: Baseline = "none",
    importance_weight: Tensor | None = None,
    chunk_rows: int | None = None,
) -> tuple[Tensor, Metrics]:
    """(loss [N], metrics [N] each): the loss ``name`` of N tokens, in fp32, or in fp64 for fp64 logits.

    ``student_logits`` [N, V], the only ones with a gradient; ``head_ids`` [N, K] distinct, ``head_logprobs`` [N, K],
    ``observed_ids`` [N], ``observed_logprobs`` [N], ``teacher_tail_logprob`` [N] (by default from the head) of the
    teacher, normalised over the whole vocabulary; ``mask`` [N] is true for tokens that count, and the others give exact
    zeros whatever their numbers are. ``importance_weight`` [N] is p(A) over the probability with which A was sampled;
    it multiplies what is sampled alone. Raises KeyError for an unknown name, ValueError for shapes.
    """
    head_ids, observed_ids = head_ids.long(), observed_ids.long()
    student = bucket_logprobs(student_logits, head_ids, observed_ids, chunk_rows=chunk_rows)
    work, active = student.tail.dtype, torch.ones_like(observed_ids, dtype=torch.bool) if mask is None else mask.bool()
    head = _harmless(head_logprobs.detach().to(work), active, -math.log(2 * head_ids.shape[1]))
    tail = tail_logprob(head) if teacher_tail_logprob is None else teacher_tail_logprob.detach().to(work)
    teacher = Buckets(
        head,
        _harmless(tail, active, -math.log(2)),
        _harmless(observed_logprobs.detach().to(work), active, 0.0),
    )
    weight = torch.ones_like(student.tail) if importance_weight is None else importance_weight.detach().to(work)
    student = Buckets(*(_harmless(value, active, -1.0) for value in student))
    tokens = Tokens(
        student, teacher, (head_ids == observed_ids[:, None]).any(1), _harmless(weight, active, 0.0), residual_baseline
    )
    value, surrogate, metrics = LOSSES[name](tokens)
    loss = torch.where(active, value + surrogate - surrogate.detach(), 0.0)
    metrics = {**_masses(tokens), **metrics, "kl": value}
    return loss, {key: torch.where(active, number, 0.0).detach() for key, number in metrics.items()}


def resopd_loss(
    student_logits: Tensor,
    head_ids: Tensor,
    head_logprobs: Tensor,
    observed_ids: Tensor,
    observed_logprobs: Tensor,
    mask: Tensor | None = None,
    teacher_tail_logprob: Tensor | None = None,
    residual_baseline: Baseline = "none",
    importance_weight: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """``token_loss`` of ResOPD: (loss [N], metrics). Values estimate KL(p || q) without bias, gradients its gradient."""
    return token_loss(
        "resopd",
        student_logits,
        head_ids,
        head_logprobs,
        observed_ids,
        observed_logprobs,
        mask,
        teacher_tail_logprob=teacher_tail_logprob,
        residual_baseline=residual_baseline,
        importance_weight=importance_weight,
    )


def tail_logprob(head: Tensor) -> Tensor:
    """log(1 - exp(head).sum(1)) [N] of a head [N, K], by log(-expm1) or log1p(-exp), whichever is exact; -inf for a
    head of mass 1 or, by rounding, more."""
    mass = head.logsumexp(1).clamp_max(0.0)
    near = torch.log(-torch.expm1(mass))
    return torch.where(mass > -math.log(2), near, torch.log1p(-torch.exp(mass)))


def _harmless(value: Tensor, active: Tensor, instead: float) -> Tensor:
    """``value`` with the rows that do not count replaced before any arithmetic: 0 * nan is nan."""
    rows = active if value.ndim == 1 else active[:, None]
    return torch.where(rows, value, instead)


@torch.no_grad()
def _masses(tokens: Tokens) -> Metrics:
    """Masses of the heads, whether the sampled token is in it, and what the on-policy alarm adds up."""
    mass = tokens.student.head.exp().sum(1)
    hit = tokens.in_head.to(mass.dtype)
    tail = tokens.student.tail.exp()
    return {
        "student_head_mass": mass,
        "teacher_head_mass": tokens.teacher.head.exp().sum(1),
        "head_hit": hit,
        "event": hit - mass,
        "event_variance": mass * tail,
    }
