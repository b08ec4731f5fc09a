"""Token batches and teacher scores for tests: of given logits, by dense formulas."""

import torch

from miles_dmd.modalities.language.batch import TokenBatch


def batch_of(prompts, responses, *, first=0, logprobs=None):
    """A batch of these token lists, samples counted from ``first``."""
    rows = [[*p, *r] for p, r in zip(prompts, responses, strict=True)]
    width, length = max(map(len, rows)), max(map(len, responses))
    return TokenBatch(
        ids=tuple(range(first, first + len(rows))),
        prompt_ids=(0,) * len(rows),
        prompt_lengths=tuple(map(len, prompts)),
        response_lengths=tuple(map(len, responses)),
        tokens=torch.tensor([row + [0] * (width - len(row)) for row in rows]),
        logprobs=torch.zeros(len(rows), length) if logprobs is None else logprobs,
        policy_version=0,
        run_seed=0,
    )


def told_of(batch, logits, top_k):
    """What a teacher with ``logits`` [N, V] of the valid tokens tells; rubbish in the padding."""
    observed, mask = batch.observed[batch.mask], batch.mask
    logq = logits.double().log_softmax(-1)
    head = logq.topk(top_k, dim=-1)
    outside = logq.scatter(1, head.indices, -torch.inf)
    rows = {
        "head_ids": head.indices.to(torch.int32),
        "head_logprobs": head.values.float(),
        "observed_logprobs": logq.gather(1, observed[:, None])[:, 0].float(),
        "tail_logprobs": outside.logsumexp(-1).float(),
    }
    rubbish = {"head_ids": -1}
    return {
        name: torch.full((*mask.shape, *value.shape[1:]), rubbish.get(name, torch.nan), dtype=value.dtype).index_put(
            (mask,), value
        )
        for name, value in rows.items()
    }
