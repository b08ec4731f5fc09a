"""Sampling of responses: temperature 1, full support, KV cache, one generator a sample.

Anything else (a temperature, top-k, top-p, penalties) would sample from another distribution than the one whose
log-probs enter the loss, which biases every estimator of on-policy distillation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from miles_dmd.contracts.engine import RolloutRequest
from miles_dmd.modalities.language.batch import TokenBatch
from miles_dmd.network import noise


class Responses(NamedTuple):
    """Responses to B prompts, padded on the right with 0."""

    lengths: tuple[int, ...]
    """Up to and with the first end token, or to ``max_new_tokens``."""
    tokens: Tensor
    """[B, R] int64, on the CPU."""
    logprobs: Tensor
    """[B, R] fp32, on the CPU: log-prob of each token in the distribution that it was drawn from."""


@torch.no_grad()
def sample(
    network: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    seeds: Sequence[int],
    max_new_tokens: int,
    end_ids: Sequence[int],
    device: torch.device,
) -> Responses:
    """Draw a response to each prompt. Its numbers come from ``seeds[b]`` alone: the same, whatever else is sampled.

    Prompts are padded on the left, masked, and their positions counted from their own first token, by transformers'
    ``generate``, which knows how each architecture caches what it has seen. It is told to take the largest score, and
    ``_Draw`` leaves it one token to choose.
    """
    longest = max(map(len, prompts))
    padded = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    seen = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    draw = _Draw(seeds, max_new_tokens, device)
    _generate(
        network,
        input_ids=torch.tensor(padded, device=device),
        attention_mask=torch.tensor(seen, device=device),
        logits_processor=[draw],
        max_new_tokens=max_new_tokens,
        eos_token_id=list(end_ids) or None,
    )
    tokens, logprobs = torch.stack(draw.tokens, 1).cpu(), torch.stack(draw.logprobs, 1).cpu()
    steps = torch.arange(tokens.shape[1])
    ends = torch.isin(tokens, torch.tensor(end_ids, dtype=torch.long)).int()
    before = ends.cumsum(1) - ends == 0  # no end token in front of it
    lengths = before.sum(1)
    longest = int(lengths.max())
    keep = (steps < lengths[:, None])[:, :longest]
    return Responses(
        tuple(lengths.tolist()), tokens[:, :longest].where(keep, 0), logprobs[:, :longest].where(keep, 0.0)
    )


def sampled_batch(
    network: nn.Module,
    prompts: Sequence[Sequence[int]],
    requests: Sequence[RolloutRequest],
    *,
    max_new_tokens: int,
    end_ids: Sequence[int],
    version: int,
    run_seed: int,
    device: torch.device,
) -> TokenBatch:
    """The responses to ``requests``, with their prompts, which ``prompts`` holds by prompt id."""
    asked = [list(prompts[request.prompt_id]) for request in requests]
    seeds = [request.seed for request in requests]
    found = sample(network, asked, seeds=seeds, max_new_tokens=max_new_tokens, end_ids=end_ids, device=device)
    whole = [
        torch.tensor([*prompt, *response[:length]])
        for prompt, response, length in zip(asked, found.tokens.tolist(), found.lengths, strict=True)
    ]
    return TokenBatch(
        ids=tuple(request.sample_id for request in requests),
        prompt_ids=tuple(request.prompt_id for request in requests),
        prompt_lengths=tuple(map(len, asked)),
        response_lengths=found.lengths,
        tokens=pad_sequence(whole, batch_first=True),
        logprobs=found.logprobs,
        policy_version=version,
        run_seed=run_seed,
    )


class _Draw:
    """Logits processor that draws the next token of each row, remembers it, and leaves no other."""

    def __init__(self, seeds: Sequence[int], max_new_tokens: int, device: torch.device) -> None:
        # all numbers of a sample at once; how many of them are read depends on its end token
        uniform = [torch.rand(max_new_tokens, generator=noise.from_seed(seed), dtype=torch.float64) for seed in seeds]
        self.uniform = torch.stack(uniform, 1).to(device)
        self.tokens: list[Tensor] = []
        self.logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        logprobs = scores.double().log_softmax(-1)
        drawn = inverse_cdf(logprobs, self.uniform[len(self.tokens)])
        self.tokens.append(drawn)
        self.logprobs.append(logprobs.gather(1, drawn[:, None])[:, 0].float())
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn[:, None], 0.0)


def inverse_cdf(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """[B] int64: of each row of ``logprobs`` [B, V] fp64 the token in which ``uniform`` [B] in [0, 1) falls.

    fp64, because fp32 sums over 150,000 tokens would never reach those of less than 1e-7.
    """
    below = logprobs.exp().cumsum(-1)
    total = below[:, -1:]
    # rounding may bring u to the total itself, beyond the last token
    place = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(below, place, right=True)[:, 0]


def _generate(network: Any, **call: Any) -> None:
    from transformers import GenerationConfig

    # the model's own file may ask for a temperature, top-k, penalties: all of it goes
    own, network.generation_config = network.generation_config, GenerationConfig()
    try:
        network.generate(do_sample=False, use_cache=True, pad_token_id=0, **call)
    finally:
        network.generation_config = own
