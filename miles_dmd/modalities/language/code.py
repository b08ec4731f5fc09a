"""Torch code of language models, as the shared machinery calls it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from miles_dmd.contracts.family import ModelFamily
from miles_dmd.modalities.language.batch import TokenBatch
from miles_dmd.modalities.language.model import LanguageModel
from miles_dmd.modalities.language.studio import LanguageStudio
from miles_dmd.training.compute import Compute

if TYPE_CHECKING:
    from miles_dmd.config.args import Args
    from miles_dmd.contracts.modality import ModalityCode


class LanguageCode:
    batch = TokenBatch

    def prepare(self, args: Args, texts: Sequence[str], device: torch.device) -> str:
        """Nothing: the rollout engine turns prompts into tokens, which travel in its batches."""
        return ""

    def open_prompts(self, prepared: str) -> None: ...

    def model(self, family: ModelFamily, network: nn.Module, dtype: torch.dtype) -> LanguageModel:
        return LanguageModel(network, dtype)

    def recompute(self, network: nn.Module) -> None:
        """Recompute activations in the backward pass. transformers does that in training mode only, in which these
        networks compute the same: those with dropout are refused."""
        network.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        network.train()

    def ready(self, batch: TokenBatch, prompts: None, family: ModelFamily, device: torch.device) -> TokenBatch:
        return batch.to(device)

    def studio(self, args: Args, compute: Compute, prompts: None, texts: Sequence[str]) -> LanguageStudio:
        return LanguageStudio(args, compute, texts)


CODE: ModalityCode = LanguageCode()
