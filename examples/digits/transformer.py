"""The teacher's network: a small SD3.5-shaped transformer, trained to predict the flow-matching velocity."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from text import CLIP_WIDTH, T5_WIDTH
from torch import Tensor
from torch.nn import functional as F

Report = Callable[[str], None]
SHIFT = 3.0


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of the teacher's training."""

    steps: int = 3000
    batch: int = 64
    lr: float = 2e-3
    prompt_dropout: float = 0.12
    """Share of samples that see the empty prompt: classifier-free guidance needs that branch."""
    ema_decay: float = 0.998


def build_transformer(layers: int = 2, heads: int = 2, head_dim: int = 32) -> Any:
    """SD3.5-Medium's features at small size: rms_norm on q and k, dual attention in all blocks but the last."""
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=16,
        out_channels=16,
        num_layers=layers,
        attention_head_dim=head_dim,
        num_attention_heads=heads,
        caption_projection_dim=heads * head_dim,
        joint_attention_dim=T5_WIDTH,
        pooled_projection_dim=2 * CLIP_WIDTH,
        pos_embed_max_size=8,
        dual_attention_layers=tuple(range(layers - 1)),
        qk_norm="rms_norm",
    )


def batches(
    latents: tuple[Tensor, Tensor], labels: Tensor, embeddings: tuple[Tensor, Tensor], recipe: Recipe
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """(x_sigma, sigma, velocity, prompt embeddings, pooled): one batch a step, on fresh noise.

    latents: posterior mean and std [N, 16, 8, 8], scaled; embeddings: [11, L, D] and [11, P], the last one of "".
    """
    mean, std = latents
    hidden, pooled = embeddings
    for _ in range(recipe.steps):
        rows = torch.randint(len(labels), (recipe.batch,))
        clean = mean[rows] + std[rows] * torch.randn_like(mean[rows])
        noise = torch.randn_like(clean)
        # Logit-normal (Esser et al. 2024, eq. 19), shifted as at sampling (eq. 23).
        u = torch.sigmoid(torch.randn(len(rows)))
        sigma = SHIFT * u / (1 + (SHIFT - 1) * u)
        prompt = torch.where(torch.rand(len(rows)) < recipe.prompt_dropout, len(hidden) - 1, labels[rows])
        level = sigma[:, None, None, None]
        yield (1 - level) * clean + level * noise, sigma, noise - clean, hidden[prompt], pooled[prompt]


def train_transformer(
    latents: tuple[Tensor, Tensor], labels: Tensor, embeddings: tuple[Tensor, Tensor], recipe: Recipe, report: Report
) -> Any:
    """The averaged (EMA) weights of a transformer trained on velocity = noise - clean. fp32."""
    model = build_transformer()
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.99), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.lr, total_steps=recipe.steps, pct_start=0.1)
    running = 0.0
    for step, (noisy, sigma, velocity, hidden, pooled) in enumerate(batches(latents, labels, embeddings, recipe)):
        predicted = model(noisy, hidden, pooled, sigma * 1000, return_dict=False)[0]
        loss = F.mse_loss(predicted, velocity)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        follow(average, model, min(recipe.ema_decay, (step + 1) / (step + 10)))
        running = loss.item() if step == 0 else 0.98 * running + 0.02 * loss.item()
        if step % 250 == 0 or step == recipe.steps - 1:
            report(f"transformer {step:5d}/{recipe.steps}  velocity error {running:.4f}")
    return average.eval()


@torch.no_grad()
def follow(average: Any, model: Any, decay: float) -> None:
    """One step of the exponential moving average of the weights."""
    torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - decay)
