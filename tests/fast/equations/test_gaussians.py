"""A Gaussian student reaches a Gaussian teacher: sign, normaliser, noise law and guidance, all against closed forms."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from miles_dmd import equations as eq


@dataclass
class Gaussian:
    """Independent Gaussian data of which the flow's velocity is known: v = (x - E[x0 | x]) / sigma."""

    mean: Tensor
    scale: Tensor

    def velocity(self, x: Tensor, sigma: Tensor) -> Tensor:
        level = sigma.reshape(-1, 1)
        variance = self.scale**2
        gain = (1 - level) * variance / ((1 - level) ** 2 * variance + level**2)
        clean = self.mean + gain * (x - (1 - level) * self.mean)
        return (x - clean) / level


TEACHER = Gaussian(torch.tensor([1.5, -1.0, 0.3, 0.0]), torch.tensor([0.5, 1.0, 0.2, 1.5]))


def _distil(real_velocity, steps=500, batch=128, sign=1.0):
    """Mean and scale of a student x = a + b z that follows the surrogate, its fake score always exact."""
    generator = torch.Generator().manual_seed(0)
    mean, log_scale = torch.zeros(4, requires_grad=True), torch.zeros(4, requires_grad=True)
    optimizer = torch.optim.Adam([mean, log_scale], lr=0.03)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, steps)
    for _ in range(steps):
        z, noise = torch.randn(2, batch, 4, generator=generator)
        sigma = eq.truncated_shifted_sigma(torch.rand(batch, generator=generator), 0.02, 0.98, 3.0)
        x_gen = mean + log_scale.exp() * z
        x = eq.add_noise(x_gen.detach(), noise, sigma)
        fake = Gaussian(mean.detach(), log_scale.detach().exp())
        x0_real, x0_fake = (eq.velocity_to_x0(x, v(x, sigma), sigma) for v in (real_velocity, fake.velocity))
        gradient, _, nonfinite = eq.dmd_gradient(x_gen, x0_real, x0_fake, 1e-5)
        assert nonfinite == 0
        optimizer.zero_grad()
        eq.dmd_surrogate_loss(x_gen, sign * gradient).backward()
        optimizer.step()
        decay.step()
    return mean.detach(), log_scale.detach().exp()


def test_the_student_reaches_the_teachers_mean_and_scale():
    mean, scale = _distil(TEACHER.velocity)

    assert_close(mean, TEACHER.mean, atol=0.05, rtol=0)
    assert_close(scale, TEACHER.scale, atol=0.05, rtol=0.05)


def test_with_the_sign_turned_round_the_student_flees():
    mean, _ = _distil(TEACHER.velocity, steps=60, sign=-1.0)

    assert ((mean - TEACHER.mean).abs() >= TEACHER.mean.abs() - 0.05).all()


@pytest.mark.parametrize("guided", [lambda c, u: eq.standard_cfg(c, u, 2.5), lambda c, u: eq.legacy_cfg(c, u, 1.5)])
def test_guidance_moves_the_student_past_the_conditional_mean_by_the_scale(guided):
    # with equal variances the guided score is that of a Gaussian around u + s (c - u)
    unconditional = Gaussian(torch.tensor([0.5, 0.0, 0.0, -0.5]), TEACHER.scale)

    mean, scale = _distil(lambda x, s: guided(TEACHER.velocity(x, s), unconditional.velocity(x, s)))

    expected = unconditional.mean + 2.5 * (TEACHER.mean - unconditional.mean)
    assert_close(mean, expected, atol=0.08, rtol=0)
    assert_close(scale, TEACHER.scale, atol=0.05, rtol=0.05)


def test_the_true_velocity_minimises_the_fake_scores_loss():
    generator = torch.Generator().manual_seed(1)
    z, noise = torch.randn(2, 50_000, 4, generator=generator)
    x_gen, sigma = TEACHER.mean + TEACHER.scale * z, torch.full((50_000,), 0.6)
    x = eq.add_noise(x_gen, noise, sigma)
    offset, slope = torch.zeros(4, requires_grad=True), torch.zeros(4, requires_grad=True)

    prediction = TEACHER.velocity(x, sigma) + offset + slope * (x - x.mean(0))
    eq.fake_score_loss(prediction, eq.fake_score_target(x_gen, noise)).backward()

    assert offset.grad.abs().max() < 0.01
    assert slope.grad.abs().max() < 0.01


def test_euler_steps_along_the_teachers_flow_turn_noise_into_its_data():
    x = torch.randn(20_000, 4, generator=torch.Generator().manual_seed(2))
    sigmas = eq.shift_sigma(torch.linspace(1, 0, 257), 3.0)

    for sigma_from, sigma_to in pairwise(sigmas):
        x = eq.ode_euler_step(x, TEACHER.velocity(x, sigma_from.expand(len(x))), sigma_from, sigma_to)

    assert_close(x.mean(0), TEACHER.mean, atol=0.05, rtol=0)
    assert_close(x.std(0), TEACHER.scale, atol=0, rtol=0.05)
