"""dmd2's objectives, each times a drawn number near one."""

import dataclasses

from drawing import drawn
from miles_dmd.losses.dmd2.objective import fake_score_loss, generator_loss


def noisy(output):
    loss = output.loss * (1 + drawn())
    return dataclasses.replace(output, loss=loss, metrics={**output.metrics, "loss": loss.detach()})


def student(models, batch, external, options):
    return noisy(generator_loss(models, batch, external, options))


def fake_score(models, batch, external, options):
    return noisy(fake_score_loss(models, batch, external, options))
