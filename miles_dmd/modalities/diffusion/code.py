"""Torch code of diffusion models, as the shared machinery calls it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from miles_dmd.modalities.diffusion.batch import DenoisingBatch
from miles_dmd.modalities.diffusion.conditions import PromptTable
from miles_dmd.modalities.diffusion.denoiser import Denoiser
from miles_dmd.modalities.diffusion.encoding import ensure_table
from miles_dmd.modalities.diffusion.studio import DiffusionStudio
from miles_dmd.training.compute import Compute

if TYPE_CHECKING:
    from miles_dmd.config.args import Args
    from miles_dmd.contracts.modality import ModalityCode
    from miles_dmd.modalities.diffusion.family import DiffusionFamily


class DiffusionCode:
    batch = DenoisingBatch

    def prepare(self, args: Args, texts: Sequence[str], device: torch.device) -> str:
        """Encode the prompts; the path of their table."""
        return str(ensure_table(args, texts, device))

    def open_prompts(self, prepared: str) -> PromptTable:
        return PromptTable(Path(prepared))

    def model(self, family: DiffusionFamily, network: nn.Module, dtype: torch.dtype) -> Denoiser:
        return Denoiser(family.code(), network, dtype)

    def recompute(self, network: nn.Module) -> None:
        network.enable_gradient_checkpointing()  # type: ignore[operator]

    def ready(
        self, batch: DenoisingBatch, prompts: PromptTable, family: DiffusionFamily, device: torch.device
    ) -> DenoisingBatch:
        """With the conditions of its prompts, which do not travel with it."""
        uncond = prompts.unconditional(len(batch)) if family.can_guide else None
        return replace(batch.to(device), cond=prompts.lookup(batch.prompt_ids), uncond=uncond)

    def studio(self, args: Args, compute: Compute, prompts: PromptTable, texts: Sequence[str]) -> DiffusionStudio:
        return DiffusionStudio(args, compute, prompts)


CODE: ModalityCode = DiffusionCode()  # type: ignore[assignment] # its family and prompts are those of its modality
