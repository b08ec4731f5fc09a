"""DenoisingBatch: sampled latents with ids, noise levels and policy version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

Cond = Mapping[str, Tensor]
"""Keyword arguments of the network that stand for the prompt, each with a leading sample axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenoisingBatch:
    """Stop steps of few-step rollouts, for B samples: enough to take its last step again, with gradient."""

    ids: tuple[int, ...]
    """Sample ids, unique in a run."""
    prompt_ids: tuple[int, ...]
    """Rows of the prompt table; embeddings do not travel."""
    stop_steps: tuple[int, ...]
    latents: Tensor
    """[B, C, H, W] fp32, x_k: what the stop step started from."""
    sigma: Tensor
    """[B] fp32, sigma_k in (0, 1]."""
    clean: Tensor
    """[B, C, H, W] fp32, what the stop step made of it, without gradient."""
    policy_version: int
    """Version of the student that sampled it: 0 before its first update."""
    run_seed: int
    """With a sample's id, the root of all randomness that is about this sample."""
    cond: Cond | None = None
    """Embeddings of the prompts, looked up by the trainer just before an objective or scorer sees the batch."""
    uncond: Cond | None = None
    """Embeddings of the unconditional branch, one row a sample; None where the family has none."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def weight(self) -> float:
        """Samples: losses and metrics are means over them."""
        return len(self.ids)

    def take(self, rows: Sequence[int] | range) -> DenoisingBatch:
        """The samples at ``rows``, in that order."""
        index = torch.as_tensor(list(rows), dtype=torch.long, device=self.latents.device)
        return replace(
            self,
            ids=tuple(self.ids[row] for row in rows),
            prompt_ids=tuple(self.prompt_ids[row] for row in rows),
            stop_steps=tuple(self.stop_steps[row] for row in rows),
            latents=self.latents[index],
            sigma=self.sigma[index],
            clean=self.clean[index],
            cond=_take(self.cond, index),
            uncond=_take(self.uncond, index),
        )

    def to(self, device: torch.device) -> DenoisingBatch:
        return replace(self, latents=self.latents.to(device), sigma=self.sigma.to(device), clean=self.clean.to(device))

    @staticmethod
    def join(parts: Sequence[DenoisingBatch]) -> DenoisingBatch:
        """One batch of several, in order; they must be of one run and one policy version."""
        first = parts[0]
        if {(part.run_seed, part.policy_version) for part in parts} != {(first.run_seed, first.policy_version)}:
            raise ValueError("batches of different runs or policy versions cannot be joined")
        return replace(
            first,
            ids=tuple(i for part in parts for i in part.ids),
            prompt_ids=tuple(i for part in parts for i in part.prompt_ids),
            stop_steps=tuple(k for part in parts for k in part.stop_steps),
            latents=torch.cat([part.latents for part in parts]),
            sigma=torch.cat([part.sigma for part in parts]),
            clean=torch.cat([part.clean for part in parts]),
        )


def _take(cond: Cond | None, index: Tensor) -> Cond | None:
    # conditions stay on the CPU until the denoiser casts them, wherever the latents are
    return None if cond is None else {name: value[index.to(value.device)] for name, value in cond.items()}
