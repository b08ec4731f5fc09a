"""Log-probabilities of K + 1 buckets (K head tokens, one tail) and of one token, from logits, chunk by chunk.

All on-policy distillation losses here are functions of these K + 2 numbers per row, so one closed-form backward serves
them. Memory beyond the logits: one chunk, and the gradient in the logits' own dtype; a dense log_softmax in fp32 with
autograd holds several [N, V] tensors of 4 bytes an entry.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_CHUNK_ENTRIES = {"cpu": 2**18}
_DEVICE_CHUNK_ENTRIES = 2**25
"""Entries of a chunk. On CPUs a chunk stays in the cache (1 MiB in fp32): at V = 151,936 one or two rows take a third
of the time of 64. Elsewhere it is large enough to fill the device (128 MiB)."""


class Buckets(NamedTuple):
    """Log-probabilities under one distribution over the whole vocabulary."""

    head: Tensor
    """[N, K], of the head tokens."""
    tail: Tensor
    """[N], of all other tokens together; -inf where there is none."""
    observed: Tensor
    """[N], of the token that was sampled."""


def bucket_logprobs(
    logits: Tensor, head_ids: Tensor, observed_ids: Tensor, *, chunk_rows: int | None = None
) -> Buckets:
    """(head [N, K], tail [N], observed [N]) log-probabilities, fp32 (fp64 for fp64 logits), differentiable in logits.

    ``logits`` [N, V] floating; ``head_ids`` [N, K] with 1 <= K <= V, distinct within a row; ``observed_ids`` [N]. The
    tail is summed by itself and never as 1 - head mass, so it is right where the head's mass rounds to 1. Rows are
    independent; ``chunk_rows`` changes memory and time only. A row of which no gradient is asked gets exact zeros,
    whatever its logits are. Raises ValueError for shapes and dtypes that do not fit.

    Backward, with w the gradients of the numbers and W their sum: dz_j = sum_S w_i 1[j = i] + w_tail 1[j not in S]
    p_j / tau + w_A 1[j = A] - W p_j, tau the tail's mass. Log-sum-exp of parts and its gradient: Blanchard et al. 2021
    (10.1093/imanum/draa038); the estimator that needs it: arXiv 2606.06021.
    """
    _check(logits, head_ids, observed_ids)
    rows = chunk_rows or max(1, _CHUNK_ENTRIES.get(logits.device.type, _DEVICE_CHUNK_ENTRIES) // logits.shape[1])
    return Buckets(*_BucketLogprobs.apply(logits, head_ids.long(), observed_ids.long(), rows))


class _BucketLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, head_ids: Tensor, observed_ids: Tensor, rows: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        work = torch.float64 if logits.dtype == torch.float64 else torch.float32
        head = logits.new_empty(head_ids.shape, dtype=work)
        tail, observed, normaliser = (logits.new_empty(len(logits), dtype=work) for _ in range(3))
        for part, ids, at, *numbers in zip(
            *(value.split(rows) for value in (logits, head_ids, observed_ids, head, tail, observed, normaliser)),
            strict=True,
        ):
            chunk = part.to(work, copy=True)
            h, t, a, z = numbers
            torch.gather(chunk, 1, at[:, None], out=a[:, None])
            torch.gather(chunk, 1, ids, out=h)
            chunk.scatter_(1, ids, -torch.inf)
            # in place: torch.logsumexp would hold a second chunk
            largest = chunk.amax(1, keepdim=True).nan_to_num_(neginf=0.0)
            torch.add(chunk.sub_(largest).exp_().sum(1).log_(), largest[:, 0], out=t)
            torch.logaddexp(h.logsumexp(1), t, out=z)
        ctx.save_for_backward(logits, head_ids, observed_ids, head - normaliser[:, None], tail, normaliser)
        ctx.rows = rows
        return head - normaliser[:, None], tail - normaliser, observed - normaliser

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_head: Tensor, to_tail: Tensor, to_observed: Tensor) -> tuple[Tensor, None, None, None]:
        logits, head_ids, observed_ids, head, tail, normaliser = ctx.saved_tensors
        whole = to_head.sum(1) + to_tail + to_observed
        # of a token j in the tail, p_j = exp(z_j - tail) * tau: one exponential serves p_j and p_j / tau
        scale = (to_tail - (tail - normaliser).exp() * whole)[:, None]
        at_head = to_head - head.exp() * whole[:, None]
        gradient = torch.empty_like(logits)
        for part, out, ids, at, of_tail, factor, of_head, of_observed in zip(
            *(
                value.split(ctx.rows)
                for value in (logits, gradient, head_ids, observed_ids, tail, scale, at_head, to_observed)
            ),
            strict=True,
        ):
            chunk = part.to(scale.dtype, copy=True).sub_(of_tail[:, None]).exp_().mul_(factor)
            # entries of the head, which overflow where the tail is small, are replaced
            chunk.scatter_(1, ids, of_head).scatter_add_(1, at[:, None], of_observed[:, None])
            asked = (factor[:, 0] != 0) | (of_head != 0).any(1) | (of_observed != 0)
            out.copy_(chunk.where(asked[:, None], 0.0))
        return gradient, None, None, None


def _check(logits: Tensor, head_ids: Tensor, observed_ids: Tensor) -> None:
    if logits.ndim != 2 or not logits.is_floating_point():
        raise ValueError(f"logits must be [N, V] and floating, got {list(logits.shape)} {logits.dtype}")
    rows, vocabulary = logits.shape
    if head_ids.ndim != 2 or len(head_ids) != rows or not 1 <= head_ids.shape[1] <= vocabulary:
        raise ValueError(f"head_ids must be [{rows}, K] with 1 <= K <= {vocabulary}, got {list(head_ids.shape)}")
    if tuple(observed_ids.shape) != (rows,):
        raise ValueError(f"observed_ids must be [{rows}], one token a row, got {list(observed_ids.shape)}")
