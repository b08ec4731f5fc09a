"""DMD2's generator loss, fake-score loss and scorer. All arithmetic is fp32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from miles_dmd import equations
from miles_dmd.contracts.loss import LossOutput
from miles_dmd.equations import (
    add_noise,
    dmd_gradient,
    dmd_surrogate_loss,
    fake_score_target,
    shift_sigma,
    truncated_shifted_sigma,
    velocity_to_x0,
)
from miles_dmd.errors import ConfigError
from miles_dmd.losses.dmd2 import Options
from miles_dmd.modalities.diffusion.batch import DenoisingBatch
from miles_dmd.modalities.diffusion.denoiser import Denoiser
from miles_dmd.network import noise

if TYPE_CHECKING:
    from miles_dmd.contracts.loss import Objective, Scorer


def fake_score_loss(
    models: Mapping[str, Denoiser],
    batch: DenoisingBatch,
    external: Mapping[str, Mapping[str, Tensor]],
    options: Options,
) -> LossOutput:
    """Velocity matching on the student's samples, whose distribution the fake score learns, over the full noise range.

    That range contains the one in which it is asked for scores (DMD2's code does the same).
    """
    own = noise.generators(batch, "fake_score")
    sigma = shift_sigma(noise.uniform(own), options.fake_shift).to(batch.clean.device)
    eps = noise.normal(own, batch.clean.shape[1:]).to(batch.clean.device)
    noisy = add_noise(batch.clean, eps, sigma)
    velocity = models["fake_score"].velocity(noisy, sigma, _cond(batch))
    loss = equations.fake_score_loss(velocity, fake_score_target(batch.clean, eps))
    return LossOutput(loss, {"loss": loss.detach()}, _count_nonfinite(batch.clean))


@torch.no_grad()
def score(models: Mapping[str, Denoiser], batch: DenoisingBatch, options: Options) -> dict[str, Tensor]:
    """Clean predictions of the teacher (guided) and the fake score (guidance 1) on one and the same noised sample.

    ``teacher_clean`` and ``critic_clean`` [B, C, H, W], ``score_sigma`` [B], all fp32.
    """
    if options.teacher_guidance > 1 and batch.uncond is None:
        raise ConfigError(
            f"--teacher-guidance {options.teacher_guidance} needs an unconditional branch, and this model family has "
            "none; pass --teacher-guidance 1"
        )
    own = noise.generators(batch, "score")
    sigma = truncated_shifted_sigma(noise.uniform(own), options.dm_sigma_min, options.dm_sigma_max, options.dm_shift)
    sigma = sigma.to(batch.clean.device)
    noisy = add_noise(batch.clean, noise.normal(own, batch.clean.shape[1:]).to(sigma.device), sigma)
    cond = _cond(batch)
    teacher = models["teacher_score"].guided_velocity(
        noisy, sigma, cond, batch.uncond or cond, options.teacher_guidance
    )
    return {
        "teacher_clean": velocity_to_x0(noisy, teacher, sigma),
        "critic_clean": models["fake_score"].clean(noisy, sigma, cond),
        "score_sigma": sigma,
    }


def generator_loss(
    models: Mapping[str, Denoiser],
    batch: DenoisingBatch,
    external: Mapping[str, Mapping[str, Tensor]],
    options: Options,
) -> LossOutput:
    """Distribution matching: the student takes its stop step again, with gradient, and moves from the fake score
    towards the teacher."""
    scores = external["critic"]
    teacher, critic = scores["teacher_clean"].to(batch.clean.device), scores["critic_clean"].to(batch.clean.device)
    generated = models["student"].clean(batch.latents, batch.sigma, _cond(batch))
    gradient, normalizer, nonfinite = dmd_gradient(generated, teacher, critic, options.normalizer_floor)
    loss = dmd_surrogate_loss(generated, gradient)
    detached = generated.detach()
    metrics = {
        "loss": loss.detach(),
        "teacher_critic_gap": (teacher - critic).abs().mean(),
        "normalizer": normalizer.mean(),
        "rollout_drift": (detached - batch.clean).abs().mean(),
        "score_sigma": scores["score_sigma"].mean(),
        **_moments("generated", detached),
        **_moments("teacher_clean", teacher),
        **_moments("critic_clean", critic),
    }
    return LossOutput(loss, metrics, nonfinite + _count_nonfinite(generated))


def _cond(batch: DenoisingBatch) -> Mapping[str, Tensor]:
    if batch.cond is None:
        raise ValueError("the batch has no conditions; the trainer looks them up before it calls an objective")
    return batch.cond


def _moments(name: str, value: Tensor) -> dict[str, Tensor]:
    per_sample = value.flatten(1)
    return {f"{name}_mean": per_sample.mean(1).mean(), f"{name}_std": per_sample.std(1).mean()}


def _count_nonfinite(value: Tensor) -> Tensor:
    return (~torch.isfinite(value.detach())).sum()


if TYPE_CHECKING:  # mypy compares what the loss type names as text
    _objectives: tuple[Objective, ...] = (generator_loss, fake_score_loss)
    _scorer: Scorer = score
