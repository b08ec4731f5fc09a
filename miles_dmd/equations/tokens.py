"""On-policy distillation losses of single tokens: ResOPD, forward KL over head and tail, sampled k2.

Student p, teacher q, both normalised over the whole vocabulary. S: the teacher's top-k, the head; all other tokens are
the tail, of mass tau. A: the token that the student sampled. r = log p - log q, L = log tau_p - log tau_q.

A loss is a function of the K + 2 log-probabilities of each side; its value estimates a divergence and its gradient is
the estimator's: sg(value) + surrogate - sg(surrogate), where all coefficients in the surrogate are detached. Values of
single tokens can be negative; clamped, they would be biased.
"""

import math
from collections.abc import Mapping
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from miles_dmd.equations.buckets import Buckets, bucket_logprobs

TAIL_FLOOR = 1e-5
"""Least tail mass in L, for both sides. The tail of an fp32 payload is noise below 1e-6, and any L keeps ResOPD
unbiased that does not depend on A; with both tails tiny L is 0."""

Baseline = Literal["none", "bucket"]
Metrics = dict[str, Tensor]


class TokenLoss(Protocol):
    """Loss [N] of the log-probabilities of both sides; the baseline is ResOPD's, the weight of what is sampled."""

    def __call__(
        self,
        student: Buckets,
        teacher: Buckets,
        hit: Tensor,
        *,
        residual_baseline: Baseline = "none",
        importance_weight: Tensor | None = None,
    ) -> Tensor: ...


def resopd(
    student: Buckets,
    teacher: Buckets,
    hit: Tensor,
    *,
    residual_baseline: Baseline = "none",
    importance_weight: Tensor | None = None,
) -> Tensor:
    """[N]: KL_c + 1[A not in S] w (r_A - L), a reverse KL whose gradient is also unbiased, for A drawn from p.

    KL_c = sum_S p_i r_i + tau_p L is exact over S and tail; only the rest is sampled. Its gradient is that of KL_c plus
    1[A not in S] w ((r_A - c) d log p_A - (L - c) d log tau_p), with c = 0 as published, or c = L with the baseline
    "bucket": no noise where p and q agree inside the tail. ``importance_weight`` [N] is w = p(A) / mu(A) for A drawn
    from mu. ``hit`` [N]: A is in S. Raises ValueError for another baseline.
    Tail residualization for sparse on-policy distillation (ResOPD), in the form of docs/opd.md.
    """
    if residual_baseline not in get_args(Baseline):
        raise ValueError(f"residual_baseline must be one of {', '.join(get_args(Baseline))}, got {residual_baseline!r}")
    ratio = tail_log_ratio(student.tail, teacher.tail)
    centre = ratio if residual_baseline == "bucket" else torch.zeros_like(ratio)
    coarse, residual = _coarse_and_residual(student, teacher, hit, importance_weight)
    head = student.head.detach()
    weight = _weight_of_miss(hit, importance_weight)
    of_head = head.exp() * (head - teacher.head)
    of_tail = student.tail.detach().exp() * ratio - weight * (ratio - centre)
    of_observed = torch.where(hit, 0, weight * (student.observed.detach() - teacher.observed - centre))
    surrogate = (of_head * student.head).sum(1) + of_tail * _log_tail(student) + of_observed * student.observed
    return _with_gradient_of(coarse + residual, surrogate)


def forward_kl_topk_tail(
    student: Buckets,
    teacher: Buckets,
    hit: Tensor,
    *,
    residual_baseline: Baseline = "none",
    importance_weight: Tensor | None = None,
) -> Tensor:
    """[N]: sum_S q_i (log q_i - log p_i) + tau_q (log tau_q - log tau_p), at least 0 and at most the forward KL.

    Nothing is sampled, so ``hit``, the baseline and the weight are not read.
    Hinton et al. 2015 (arXiv 1503.02531) with all tokens outside S as one class.
    """
    of_head, of_tail = teacher.head.exp(), teacher.tail.exp()
    value = (of_head * (teacher.head - student.head.detach())).sum(1)
    value = value - of_tail * tail_log_ratio(student.tail, teacher.tail)
    return _with_gradient_of(value, -(of_head * student.head).sum(1) - of_tail * _log_tail(student))


def sampled_k2(
    student: Buckets,
    teacher: Buckets,
    hit: Tensor,
    *,
    residual_baseline: Baseline = "none",
    importance_weight: Tensor | None = None,
) -> Tensor:
    """[N]: w r_A^2 / 2, whose mean gradient over A drawn from p is that of the reverse KL; its value is not that KL.

    Head, ``hit`` and baseline are not read. The estimator k2 of Schulman 2020, "Approximating KL divergence".
    """
    weight = 1 if importance_weight is None else importance_weight
    ratio = student.observed.detach() - teacher.observed
    return _with_gradient_of(weight * ratio.square() / 2, weight * ratio * student.observed)


LOSSES: Mapping[str, TokenLoss] = {
    "resopd": resopd,
    "forward_kl_topk_tail": forward_kl_topk_tail,
    "sampled_k2": sampled_k2,
}


def token_loss(
    name: str,
    student_logits: Tensor,
    head_ids: Tensor,
    head_logprobs: Tensor,
    observed_ids: Tensor,
    observed_logprobs: Tensor,
    mask: Tensor | None = None,
    teacher_tail_logprob: Tensor | None = None,
    residual_baseline: Baseline = "none",
    importance_weight: Tensor | None = None,
    *,
    chunk_rows: int | None = None,
    reuse_logits: bool = False,
) -> tuple[Tensor, Metrics]:
    """(loss [N], metrics [N] each): the loss ``name`` of N tokens; fp32, or fp64 for fp64 logits. Take means of both.

    ``student_logits`` [N, V] alone get a gradient. The teacher's: ``head_ids`` and ``head_logprobs`` [N, K], not
    renormalised; ``observed_logprobs`` and ``teacher_tail_logprob`` [N], the latter by default from the head.
    ``observed_ids`` [N]: what the student sampled. ``mask`` [N]: rows that count; the others give exact zeros, also for
    infinite or NaN logits and scores and for ids of no token. ``chunk_rows``, ``reuse_logits``: see bucket_logprobs.
    Metrics: see token_metrics.
    Raises ValueError for an unknown name, and for shapes that do not fit.
    On-policy distillation: Agarwal et al. 2023, arXiv 2306.13649; each loss has its own source.
    """
    if name not in LOSSES:
        raise ValueError(f"unknown token loss {name!r}: must be one of {', '.join(LOSSES)}")
    _check(head_ids, head_logprobs, observed_logprobs, mask, teacher_tail_logprob, importance_weight)
    valid = torch.ones_like(observed_ids, dtype=torch.bool) if mask is None else mask.bool()
    # before any arithmetic: 0 * nan is nan, also in the backward
    rows, width = valid[:, None], head_ids.shape[1]
    head_ids = torch.where(rows, head_ids, torch.arange(width, device=head_ids.device, dtype=head_ids.dtype))
    observed_ids = torch.where(valid, observed_ids, 0)
    student = bucket_logprobs(student_logits, head_ids, observed_ids, chunk_rows=chunk_rows, reuse_logits=reuse_logits)
    dtype, even = student.tail.dtype, -math.log(2 * width)
    student = Buckets(
        torch.where(rows, student.head, even),
        torch.where(valid, student.tail, -math.log(2)),
        torch.where(valid, student.observed, even),
    )
    head = torch.where(rows, head_logprobs.detach().to(dtype), even)
    tail = tail_logprob(head) if teacher_tail_logprob is None else teacher_tail_logprob.detach().to(dtype)
    observed = torch.where(valid, observed_logprobs.detach().to(dtype), even)
    teacher = Buckets(head, torch.where(valid, tail, -math.log(2)), observed)
    weight = None if importance_weight is None else torch.where(valid, importance_weight.detach().to(dtype), 1)
    hit = (head_ids == observed_ids[:, None]).any(1)
    loss = LOSSES[name](student, teacher, hit, residual_baseline=residual_baseline, importance_weight=weight)
    metrics = token_metrics(student, teacher, hit, importance_weight=weight)
    return torch.where(valid, loss, 0), {key: torch.where(valid, value, 0) for key, value in metrics.items()}


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
    """(loss [N], metrics [N] each): ``token_loss("resopd", ...)``, an unbiased KL(p || q) with unbiased gradient.

    Arguments, dtypes (fp32, or fp64 for fp64 logits), masked rows and ValueError as in token_loss; the estimator in
    resopd. On-policy distillation: Agarwal et al. 2023, arXiv 2306.13649.
    """
    return token_loss(
        "resopd",
        student_logits,
        head_ids,
        head_logprobs,
        observed_ids,
        observed_logprobs,
        mask,
        teacher_tail_logprob,
        residual_baseline,
        importance_weight,
    )


@torch.no_grad()
def token_metrics(
    student: Buckets, teacher: Buckets, hit: Tensor, *, importance_weight: Tensor | None = None
) -> Metrics:
    """[N] each, detached: the same numbers whatever loss is minimised.

    ``kl`` = ``kl_coarse`` + ``residual`` estimates the reverse KL without bias; ``kl_coarse`` is its exact part over
    head and tail. The on-policy alarm is z = sum(head_event) / sqrt(sum(head_event_variance)), about N(0, 1) if A is
    drawn from p: ``head_event`` is 1[A in S] - P, of variance P tau_p, P the ``student_head_mass``.
    """
    coarse, residual = _coarse_and_residual(student, teacher, hit, importance_weight)
    mass, tail = student.head.logsumexp(1).exp(), student.tail.exp()
    return {
        "kl": coarse + residual,
        "kl_coarse": coarse,
        "residual": residual,
        "residual_abs": residual.abs(),
        "tail_log_ratio": tail_log_ratio(student.tail, teacher.tail),
        "student_head_mass": mass,
        "teacher_head_mass": teacher.head.logsumexp(1).exp(),
        "head_hit": hit.to(mass.dtype),
        "head_event": torch.where(hit, tail, -mass),
        "head_event_variance": mass * tail,
    }


@torch.no_grad()
def head_overlap(logits: Tensor, head_ids: Tensor) -> Tensor:
    """[N]: share of ``head_ids`` [N, K] that is in the top K of ``logits`` [N, V].

    No part of token_metrics: on a CPU the student's top 4 take about as long as the whole loss. Some rows are enough.
    """
    own = logits.topk(head_ids.shape[1], dim=1).indices
    return (head_ids[:, :, None] == own[:, None, :]).any(2).float().mean(1)


def tail_log_ratio(student_tail: Tensor, teacher_tail: Tensor) -> Tensor:
    """[N], detached: L = log max(tau_p, TAIL_FLOOR) - log max(tau_q, TAIL_FLOOR)."""
    floor = math.log(TAIL_FLOOR)
    return student_tail.detach().clamp_min(floor) - teacher_tail.detach().clamp_min(floor)


def tail_logprob(head_logprobs: Tensor) -> Tensor:
    """[N]: log(1 - sum_S q) of a payload [N, K] that does not say it; at least log of the dtype's epsilon.

    log(-expm1(l)) or log1p(-exp(l)), whichever keeps more digits: Maechler 2012, eq. 7 (the R package Rmpfr).
    """
    mass = head_logprobs.logsumexp(1)
    mass = mass.clamp_max(-torch.finfo(mass.dtype).eps)
    return torch.where(mass > -math.log(2), (-mass.expm1()).log(), (-mass.exp()).log1p())


def _coarse_and_residual(
    student: Buckets, teacher: Buckets, hit: Tensor, importance_weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """KL_c and 1[A not in S] w (r_A - L), both [N] and detached."""
    head, tail, observed = (value.detach() for value in student)
    ratio = tail_log_ratio(tail, teacher.tail)
    coarse = (head.exp() * (head - teacher.head)).sum(1) + tail.exp() * ratio
    weight = _weight_of_miss(hit, importance_weight)
    # the teacher's score of a token in the head is not used at all
    return coarse, torch.where(hit, 0, weight * (observed - teacher.observed - ratio))


def _weight_of_miss(hit: Tensor, importance_weight: Tensor | None) -> Tensor:
    return torch.where(hit, 0.0, 1.0 if importance_weight is None else importance_weight)


def _log_tail(student: Buckets) -> Tensor:
    """log tau_p; 0, and no gradient, where there is no tail (K = V): 0 * -inf is nan."""
    return torch.where(student.tail > -torch.inf, student.tail, 0)


def _with_gradient_of(value: Tensor, surrogate: Tensor) -> Tensor:
    return value + (surrogate - surrogate.detach())


def _check(head_ids: Tensor, head_logprobs: Tensor, observed_logprobs: Tensor, *per_row: Tensor | None) -> None:
    if head_logprobs.shape != head_ids.shape:
        raise ValueError(f"shapes differ: head_logprobs {list(head_logprobs.shape)}, head_ids {list(head_ids.shape)}")
    names = ("observed_logprobs", "mask", "teacher_tail_logprob", "importance_weight")
    for name, value in zip(names, (observed_logprobs, *per_row), strict=True):
        if value is not None and value.shape != head_ids.shape[:1]:
            raise ValueError(f"{name} must be [{len(head_ids)}], got {list(value.shape)}")
