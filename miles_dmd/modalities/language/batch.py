"""TokenBatch: prompts and sampled responses with ids, log-probs and policy version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """B prompts, each with the response that the student sampled; everything but ``tokens`` is response-aligned.

    Response token t of a sample with P prompt tokens is ``tokens[P + t]``, predicted by the logits of row P + t - 1.
    """

    ids: tuple[int, ...]
    """Sample ids, unique in a run."""
    prompt_ids: tuple[int, ...]
    prompt_lengths: tuple[int, ...]
    """At least 1: the first response token needs a row that predicts it."""
    response_lengths: tuple[int, ...]
    """At least 1; an end-of-sequence token that the student sampled is part of its response."""
    tokens: Tensor
    """[B, T] int64: prompt, then response, padded on the right with 0."""
    logprobs: Tensor
    """[B, R] fp32: log-prob of each response token under the policy that sampled it, 0 in padding."""
    policy_version: int
    """Version of the student that sampled it: 0 before its first update."""
    run_seed: int
    """With a sample's id, the root of all randomness that is about this sample."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def mask(self) -> Tensor:
        """[B, R] bool: valid response tokens, padding excluded."""
        return self._steps < self._column(self.response_lengths)

    @property
    def observed(self) -> Tensor:
        """[B, R] int64: response tokens, 0 in padding."""
        places = (self._column(self.prompt_lengths) + self._steps).clamp(max=self.tokens.shape[1] - 1)
        return self.tokens.gather(1, places).where(self.mask, 0)

    @property
    def weight(self) -> float:
        """Number of valid response tokens: means are over these."""
        return float(sum(self.response_lengths))

    @property
    def _steps(self) -> Tensor:
        return torch.arange(self.logprobs.shape[1], device=self.tokens.device)

    def _column(self, lengths: Sequence[int]) -> Tensor:
        return torch.tensor(lengths, device=self.tokens.device)[:, None]

    def take(self, rows: Sequence[int] | range) -> TokenBatch:
        """The samples at ``rows``, in that order, padded as before."""
        index = torch.as_tensor(list(rows), dtype=torch.long, device=self.tokens.device)
        return replace(
            self,
            ids=tuple(self.ids[row] for row in rows),
            prompt_ids=tuple(self.prompt_ids[row] for row in rows),
            prompt_lengths=tuple(self.prompt_lengths[row] for row in rows),
            response_lengths=tuple(self.response_lengths[row] for row in rows),
            tokens=self.tokens[index],
            logprobs=self.logprobs[index],
        )

    def to(self, device: torch.device) -> TokenBatch:
        return replace(self, tokens=self.tokens.to(device), logprobs=self.logprobs.to(device))

    @staticmethod
    def join(parts: Sequence[TokenBatch]) -> TokenBatch:
        """One batch of several, in order, padded to the longest; they must be of one run and one policy version."""
        first = parts[0]
        if {(part.run_seed, part.policy_version) for part in parts} != {(first.run_seed, first.policy_version)}:
            raise ValueError("batches of different runs or policy versions cannot be joined")
        return replace(
            first,
            ids=tuple(i for part in parts for i in part.ids),
            prompt_ids=tuple(i for part in parts for i in part.prompt_ids),
            prompt_lengths=tuple(length for part in parts for length in part.prompt_lengths),
            response_lengths=tuple(length for part in parts for length in part.response_lengths),
            tokens=padded([part.tokens for part in parts]),
            logprobs=padded([part.logprobs for part in parts]),
        )


def padded(parts: Sequence[Tensor]) -> Tensor:
    """[B, N, ...] of tensors [b, n, ...]: one after another, axis 1 padded on the right with 0 to the longest."""
    longest = max(part.shape[1] for part in parts)
    sides = [0, 0] * (parts[0].ndim - 2)
    return torch.cat([pad(part, (*sides, 0, longest - part.shape[1])) for part in parts])
