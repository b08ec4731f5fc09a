"""Scores of a frozen teacher: its likeliest tokens, the sampled token, and the mass of all others.

On-policy distillation needs no more of the teacher, and a response token is 36 bytes at four head tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles_dmd.modalities.language.batch import TokenBatch
from miles_dmd.modalities.language.model import LanguageModel

CHUNK_ROWS = 1024
"""Rows of logits in fp32 at once: 0.6 GiB at a vocabulary of 152k."""
FIELDS = ("head_ids", "head_logprobs", "observed_logprobs", "tail_logprobs")


@torch.no_grad()
def teacher_scores(
    model: LanguageModel, batch: TokenBatch, top_k: int, chunk_rows: int = CHUNK_ROWS
) -> dict[str, Tensor]:
    """``head_ids`` [B, R, K] int32, ``head_logprobs`` [B, R, K], ``observed_logprobs`` [B, R] and ``tail_logprobs``
    [B, R] fp32 of the batch's response tokens; 0 in padding. Full-vocabulary log-probs at temperature 1."""
    logits, observed = model.response_logits(batch), batch.observed[batch.mask]
    parts = [
        token_scores(some, ids, top_k)
        for some, ids in zip(logits.split(chunk_rows), observed.split(chunk_rows), strict=True)
    ]
    rows = {name: torch.cat([part[name] for part in parts]) for name in FIELDS}
    return {name: aligned(value, batch.mask) for name, value in rows.items()}


def token_scores(logits: Tensor, observed: Tensor, top_k: int) -> dict[str, Tensor]:
    """Scores of N tokens from their ``logits`` [N, V] and ``observed`` [N] ids, in fp32.

    The normaliser is put together from head and tail, so that neither is one minus the other: a tail of 1e-9 has a log.
    It is -inf where the head is the whole vocabulary.
    """
    logits = logits.float()
    head = logits.topk(top_k, dim=-1)
    tail = logits.scatter(1, head.indices, -torch.inf).logsumexp(-1)
    normaliser = torch.logaddexp(head.values.logsumexp(-1), tail)
    return {
        "head_ids": head.indices.to(torch.int32),
        "head_logprobs": head.values - normaliser[:, None],
        "observed_logprobs": logits.gather(1, observed[:, None])[:, 0] - normaliser,
        "tail_logprobs": tail - normaliser,
    }


def aligned(rows: Tensor, mask: Tensor) -> Tensor:
    """[B, R, ...]: the rows [N, ...] of the valid tokens of ``mask`` [B, R] at their places, 0 in padding."""
    found = rows.new_zeros((*mask.shape, *rows.shape[1:]))
    found[mask.to(rows.device)] = rows
    return found
