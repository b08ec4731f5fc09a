"""Sampler of language models' responses, on a network of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from miles_dmd.contracts.engine import RolloutRequest
from miles_dmd.engines.inprocess.resident import ResidentEngine
from miles_dmd.modalities.language.batch import TokenBatch
from miles_dmd.modalities.language.family import language_family
from miles_dmd.modalities.language.options import language_options
from miles_dmd.modalities.language.prompts import prompt_tokens
from miles_dmd.modalities.language.sampler import sampled_batch
from miles_dmd.network.pretrained import load_network
from miles_dmd.sampling.partition import micro_batches
from miles_dmd.training.compute import Compute

if TYPE_CHECKING:
    from miles_dmd.config.args import Args
    from miles_dmd.contracts.engine import BuildEngine


class TokenEngine(ResidentEngine):
    """Samples responses at temperature 1 and full support; ``prompts`` are token ids, by prompt id."""

    def __init__(
        self,
        network: nn.Module,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        end_ids: Sequence[int],
        micro_batch_size: int,
        run_seed: int,
        device: torch.device,
    ) -> None:
        super().__init__(network, device)
        self.prompts, self.max_new_tokens, self.end_ids = prompts, max_new_tokens, tuple(end_ids)
        self.micro_batch_size, self.run_seed = micro_batch_size, run_seed

    def generate(self, requests: Sequence[RolloutRequest]) -> TokenBatch:
        self.require_awake()
        parts = [
            sampled_batch(
                self.network,
                self.prompts,
                [requests[row] for row in rows],
                max_new_tokens=self.max_new_tokens,
                end_ids=self.end_ids,
                version=self.version,
                run_seed=self.run_seed,
                device=self.device,
            )
            for rows in micro_batches(len(requests), self.micro_batch_size)
        ]
        return TokenBatch.join(parts)


def build(
    args: Args, *, compute: Compute, prompts: None, texts: Sequence[str] = (), servers: Sequence[str] = ()
) -> TokenEngine:
    family, own, directory = language_family(args), language_options(args), args.pipeline_directory
    network = load_network(family, directory, dtype=compute.dtype).requires_grad_(False).to(compute.device)
    return TokenEngine(
        network,
        prompt_tokens(family.code().open_tokenizer(directory), texts, own),
        max_new_tokens=own.max_new_tokens,
        end_ids=family.code().end_tokens(directory),
        micro_batch_size=args.rollout_micro_batch_size,
        run_seed=args.seed,
        device=compute.device,
    )


if TYPE_CHECKING:  # mypy compares what the engine type names as text
    _build: BuildEngine = build
