"""A head that learns the mean of clean latents, and its objective."""

import torch
from torch import nn

from miles_dmd.contracts.loss import LossOutput


def build(models, options):
    channels = next(models["fake_score"].network.parameters()).shape[1]
    return nn.Sequential(nn.Linear(channels, 8), nn.SiLU(), nn.Linear(8, 1))


def loss(models, batch, external, options):
    told = models["head"](batch.clean.mean((2, 3))).squeeze(1)
    error = (told - batch.clean.mean((1, 2, 3))).square().mean()
    return LossOutput(error, {"loss": error.detach(), "mean": told.detach().mean()}, (~torch.isfinite(told)).sum())
