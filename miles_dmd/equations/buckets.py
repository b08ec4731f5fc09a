"""Log-probabilities of K head tokens, of all others together (the tail) and of one token, from logits in chunks.

Every on-policy distillation loss here is a function of these K + 2 numbers per row, so one closed-form backward serves
them all. Memory beyond the logits: one chunk, and the gradient in the logits' own dtype. A dense fp32 log_softmax under
autograd holds several [N, V] tensors of four bytes an entry.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_CPU_CHUNK = 2**18
_DEVICE_CHUNK = 2**25
"""Entries of a chunk. On a CPU it stays in the cache (1 MiB in fp32): at V = 151,936 chunks of one or two rows took a
fifth of the time of 64 rows. Elsewhere it has to fill the device (128 MiB)."""


class Buckets(NamedTuple):
    """Log-probabilities of N rows, each normalised over the whole vocabulary."""

    head: Tensor
    """[N, K], of the head tokens."""
    tail: Tensor
    """[N], of all other tokens together: log tau; -inf where there are none."""
    observed: Tensor
    """[N], of the observed token, in the head or not."""


def bucket_logprobs(
    logits: Tensor,
    head_ids: Tensor,
    observed_ids: Tensor,
    *,
    chunk_rows: int | None = None,
    reuse_logits: bool = False,
) -> Buckets:
    """(head [N, K], tail [N], observed [N]), fp32 or fp64 as the logits need it; differentiable once in the logits.

    ``logits`` [N, V]; ``head_ids`` [N, K], 1 <= K <= V, distinct in a row; ``observed_ids`` [N]; integers in [0, V).
    The tail is summed by itself and never 1 - head mass, so it is right where that mass rounds to 1. ``chunk_rows``
    changes time and memory alone. Rows that no gradient reaches get exact zeros, whatever their logits.
    ``reuse_logits`` writes the gradient over the logits, which are spent by then: for those that a linear layer has
    just made and nobody else reads. Where something else needs them in the backward, torch raises RuntimeError.
    Raises ValueError for shapes and dtypes that do not fit.
    Backward, w the incoming gradients and W their sum over head, tail and observed token A, tau the tail's mass:
    dz_j = w_j 1[j in head] + w_tail 1[j in tail] p_j / tau + w_A 1[j = A] - W p_j.
    Shifted log-sum-exp: Blanchard et al. 2021, IMA J. Numer. Anal. 41(4), eq. 1.3.
    """
    _check(logits, head_ids, observed_ids)
    entries = _CPU_CHUNK if logits.device.type == "cpu" else _DEVICE_CHUNK
    rows = max(1, entries // logits.shape[1]) if chunk_rows is None else chunk_rows
    if rows < 1:
        raise ValueError(f"chunk_rows must be at least 1, got {rows}")
    return Buckets(*_BucketLogprobs.apply(logits, head_ids.long(), observed_ids.long(), rows, reuse_logits))


class _BucketLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, head_ids: Tensor, observed_ids: Tensor, chunk_rows: int, reuse_logits: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        work = torch.promote_types(logits.dtype, torch.float32)
        largest, total = (logits.new_empty(len(logits), 1, dtype=work) for _ in range(2))
        for rows in _chunks(len(logits), chunk_rows):
            tail = logits[rows].to(work, copy=True).scatter_(1, head_ids[rows], -torch.inf)
            most = tail.amax(1, keepdim=True)
            largest[rows] = most.masked_fill_(most == -torch.inf, 0)  # K = V has no tail: not inf - inf
            # torch.sum adds in pairs, unlike the CPU's log_softmax, and by hand one chunk is enough
            torch.sum(tail.sub_(largest[rows]).exp_(), 1, keepdim=True, out=total[rows])
        head = logits.gather(1, head_ids).to(work)
        observed = logits.gather(1, observed_ids[:, None]).to(work)
        # relative to the row's largest logit: the logarithm of a sum keeps few digits beside an offset of 1,000
        anchor = torch.maximum(head.amax(1, keepdim=True), largest)
        log_tail = total.log() + (largest - anchor)
        normaliser = torch.logaddexp((head - anchor).logsumexp(1, keepdim=True), log_tail)
        found = (head - anchor - normaliser, (log_tail - normaliser)[:, 0], (observed - anchor - normaliser)[:, 0])
        ctx.save_for_backward(logits, head_ids, observed_ids, largest, total, *found)
        ctx.chunk_rows, ctx.reuse_logits = chunk_rows, reuse_logits
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_head: Tensor, to_tail: Tensor, to_observed: Tensor) -> tuple[Tensor | None, ...]:
        logits, head_ids, observed_ids, largest, total, head, tail, observed = ctx.saved_tensors
        everything = to_head.sum(1) + to_tail + to_observed
        # a tail token has p_j = tau exp(z_j) / sum_tail exp(z): both of its terms are one multiple of that exponential
        of_tail = torch.where(tail > -torch.inf, to_tail - tail.exp() * everything, 0)
        factor = of_tail[:, None] / torch.where(total > 0, total, 1)
        gradient = logits.detach() if ctx.reuse_logits else torch.empty_like(logits)
        for rows in _chunks(len(logits), ctx.chunk_rows):
            torch.mul((logits[rows] - largest[rows]).exp_(), factor[rows], out=gradient[rows])
        # what is written above for head tokens (it overflows if the tail is small) and the observed one is replaced
        at_observed = (of_tail * (observed - tail).exp() + to_observed)[:, None]
        is_observed = head_ids == observed_ids[:, None]
        at_head = to_head - head.exp() * everything[:, None] + torch.where(is_observed, to_observed[:, None], 0)
        row = torch.arange(len(gradient), device=gradient.device)[:, None]
        gradient[row, observed_ids[:, None]] = at_observed.to(
            gradient.dtype
        )  # scatter_ copies it all to fp32 (CPU, bf16)
        gradient[row, head_ids] = at_head.to(gradient.dtype)
        gradient[(to_head == 0).all(1) & (to_tail == 0) & (to_observed == 0)] = 0  # 0 * nan is nan
        return gradient, None, None, None, None


def _chunks(rows: int, chunk_rows: int) -> Iterator[slice]:
    return (slice(first, first + chunk_rows) for first in range(0, rows, chunk_rows))


def _check(logits: Tensor, head_ids: Tensor, observed_ids: Tensor) -> None:
    if logits.ndim != 2 or not logits.is_floating_point():
        raise ValueError(f"logits must be [N, V] and floating, got {tuple(logits.shape)} {logits.dtype}")
    rows, vocabulary = logits.shape
    if head_ids.ndim != 2 or len(head_ids) != rows or not 1 <= head_ids.shape[1] <= vocabulary:
        raise ValueError(f"head_ids must be [{rows}, K], 1 <= K <= {vocabulary}, got {tuple(head_ids.shape)}")
    if tuple(observed_ids.shape) != (rows,):
        raise ValueError(f"observed_ids must be [{rows}], got {tuple(observed_ids.shape)}")
    for name, ids in (("head_ids", head_ids), ("observed_ids", observed_ids)):
        if ids.is_floating_point() or ids.dtype == torch.bool:
            raise ValueError(f"{name} must be integers, got {ids.dtype}")
