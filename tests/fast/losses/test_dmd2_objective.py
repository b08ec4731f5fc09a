"""DMD2's objectives where everything is known: Gaussians with exact velocities, and a student of two numbers.

Data N(m, s^2) noised as x = (1 - sigma) x0 + sigma eps has E[x0 | x] = m + (1 - sigma) s^2 / V (x - (1 - sigma) m) with
V = (1 - sigma)^2 s^2 + sigma^2, so the velocity (x - E[x0 | x]) / sigma of teacher and fake score is exact.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from miles_dmd.errors import ConfigError
from miles_dmd.losses.dmd2 import Options
from miles_dmd.losses.dmd2.objective import fake_score_loss, generator_loss, score
from miles_dmd.modalities.diffusion.batch import DenoisingBatch
from miles_dmd.modalities.diffusion.denoiser import Denoiser

SHAPE = (1, 2, 2)
TEACHER = (1.5, 0.6)


class Gaussian(nn.Module):
    """The exact velocity of N(mean, std^2); ``cond`` shifts the mean, so that guidance has something to amplify."""

    def __init__(self, mean, std):
        super().__init__()
        self.mean, self.std = torch.tensor(float(mean)), torch.tensor(float(std))

    def forward(self, x, sigma, shift):
        sigma = sigma.reshape(-1, 1, 1, 1)
        mean = self.mean + shift.reshape(-1, 1, 1, 1)
        variance = (1 - sigma) ** 2 * self.std**2 + sigma**2
        clean = mean + (1 - sigma) * self.std**2 / variance * (x - (1 - sigma) * mean)
        return (x - clean) / sigma


class Affine(nn.Module):
    """A one-step student: clean = a * noise + b, written as the velocity (x - clean) / sigma."""

    def __init__(self, scale, offset):
        super().__init__()
        self.scale, self.offset = nn.Parameter(torch.tensor(float(scale))), nn.Parameter(torch.tensor(float(offset)))

    def forward(self, x, sigma, shift):
        return (x - (self.scale * x + self.offset)) / sigma.reshape(-1, 1, 1, 1)


class Family:
    @staticmethod
    def velocity(network, x, sigma, cond):
        return network(x, sigma, cond["shift"])


def denoiser(network):
    return Denoiser(Family, network)


def rollout(student, first, count, shift=0.0, uncond_shift=0.0):
    """Samples of a one-step student: x_0 is noise at sigma 1."""
    noise = torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(first))
    cond, uncond = {"shift": torch.full((count,), shift)}, {"shift": torch.full((count,), uncond_shift)}
    with torch.no_grad():
        clean = student.clean(noise, torch.ones(count), cond)
    return DenoisingBatch(
        ids=tuple(range(first, first + count)), prompt_ids=(0,) * count, stop_steps=(0,) * count, latents=noise,
        sigma=torch.ones(count), clean=clean, policy_version=0, run_seed=0, cond=cond, uncond=uncond,
    )  # fmt: skip


def train(student, steps, *, guidance=1.0, shift=0.0, uncond_shift=0.0, lr=0.02):
    options = Options(teacher_guidance=guidance, dm_shift=1.0)
    optimizer = torch.optim.Adam(student.parameters(), lr=lr, betas=(0.0, 0.999))
    for step in range(steps):
        models = {
            "student": denoiser(student),
            "teacher_score": denoiser(Gaussian(*TEACHER)),
            # the fake score is exact too: the student's samples are N(offset, scale^2)
            "fake_score": denoiser(Gaussian(student.offset.item() - shift, student.scale.abs().item())),
        }
        batch = rollout(models["student"], step * 256, 256, shift, uncond_shift)
        external = {"critic": score(models, batch, options)}
        loss = generator_loss(models, batch, external, options).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)


def test_student_reaches_a_gaussian_teacher():
    student = Affine(scale=1.6, offset=-1.0)

    train(student, 400)

    assert student.offset.item() == pytest.approx(TEACHER[0], abs=0.05)
    assert student.scale.abs().item() == pytest.approx(TEACHER[1], abs=0.05)


def test_guidance_moves_the_student_past_the_conditional_mean():
    """Guided means: uncond + s (cond - uncond) in the prediction moves samples away from the unconditional mean."""
    plain, guided = Affine(scale=0.6, offset=1.5), Affine(scale=0.6, offset=1.5)

    train(plain, 200, shift=0.0, uncond_shift=-1.0)
    train(guided, 200, guidance=2.0, shift=0.0, uncond_shift=-1.0)

    assert plain.offset.item() == pytest.approx(TEACHER[0], abs=0.05)
    assert guided.offset.item() > TEACHER[0] + 0.4


def test_gradient_is_the_finite_difference_of_the_surrogate_with_its_target_held():
    torch.manual_seed(0)
    student = Affine(scale=1.1, offset=0.3).double()
    models = {
        "student": denoiser(student),
        "teacher_score": denoiser(Gaussian(*TEACHER)),
        "fake_score": denoiser(Gaussian(0.2, 1.0)),
    }
    options = Options(teacher_guidance=1.0)
    batch = rollout(models["student"], 0, 64)
    external = {"critic": score(models, batch, options)}
    generator_loss(models, batch, external, options).loss.backward()
    generated = models["student"].clean(batch.latents, batch.sigma, batch.cond).detach()
    scale = (generated - external["critic"]["teacher_clean"]).abs().mean(dim=(1, 2, 3), keepdim=True)
    target = generated - (external["critic"]["critic_clean"] - external["critic"]["teacher_clean"]) / scale

    def surrogate(offset):
        moved = student.scale.item() * batch.latents.double() + offset
        return 0.5 * ((moved - target.double()) ** 2).mean().item()

    step = 1e-3
    difference = (surrogate(student.offset.item() + step) - surrogate(student.offset.item() - step)) / (2 * step)
    assert student.offset.grad.item() == pytest.approx(difference, rel=1e-3)


def test_scores_are_of_one_noised_sample_and_carry_no_graph():
    fake, teacher = denoiser(Gaussian(0, 1)), denoiser(Gaussian(0, 1))
    student = denoiser(Affine(1.0, 0.0))

    found = score({"teacher_score": teacher, "fake_score": fake}, rollout(student, 0, 8), Options(teacher_guidance=1.0))

    torch.testing.assert_close(found["teacher_clean"], found["critic_clean"])  # equal networks see equal inputs
    assert not any(value.requires_grad for value in found.values())
    assert {value.dtype for value in found.values()} == {torch.float32}
    assert ((found["score_sigma"] > 0.02) & (found["score_sigma"] < 0.98)).all()


def test_randomness_belongs_to_the_sample():
    models = {"teacher_score": denoiser(Gaussian(*TEACHER)), "fake_score": denoiser(Gaussian(0, 1))}
    batch = rollout(denoiser(Affine(1.0, 0.0)), 0, 8)

    whole, part = score(models, batch, Options()), score(models, batch.take([5, 2]), Options())
    losses = [fake_score_loss(models, batch.take([row]), {}, Options()).loss.item() for row in range(8)]

    torch.testing.assert_close(whole["teacher_clean"][[5, 2]], part["teacher_clean"])
    together = fake_score_loss(models, batch, {}, Options()).loss.item()
    assert together == pytest.approx(sum(losses) / 8, rel=1e-6)


def test_fake_score_loss_is_least_at_the_students_own_distribution():
    batch = rollout(denoiser(Affine(0.7, 0.4)), 0, 4096)

    def loss(mean, std):
        return fake_score_loss({"fake_score": denoiser(Gaussian(mean, std))}, batch, {}, Options()).loss.item()

    assert loss(0.4, 0.7) < min(loss(0.8, 0.7), loss(0.0, 0.7), loss(0.4, 1.0), loss(0.4, 0.4))


def test_guidance_without_an_unconditional_branch_is_refused():
    models = {"teacher_score": denoiser(Gaussian(0, 1)), "fake_score": denoiser(Gaussian(0, 1))}
    batch = replace(rollout(denoiser(Affine(1.0, 0.0)), 0, 2), uncond=None)

    with pytest.raises(ConfigError, match=r"--teacher-guidance 4\.0 needs an unconditional branch"):
        score(models, batch, Options())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_scores_are_counted_and_not_hidden(bad):
    models = {"student": denoiser(Affine(1.0, 0.0))}
    batch = rollout(models["student"], 0, 4)
    teacher = torch.zeros(4, *SHAPE)
    teacher[1, 0, 0, 0] = bad
    external = {
        "critic": {"teacher_clean": teacher, "critic_clean": torch.ones(4, *SHAPE), "score_sigma": torch.ones(4)}
    }

    output = generator_loss(models, batch, external, Options())

    assert output.nonfinite.item() >= 1


def test_metrics_are_named_for_what_they_are():
    models = {
        "student": denoiser(Affine(1.0, 0.0)),
        "teacher_score": denoiser(Gaussian(*TEACHER)),
        "fake_score": denoiser(Gaussian(0, 1)),
    }
    batch = rollout(models["student"], 0, 64)

    metrics = generator_loss(models, batch, {"critic": score(models, batch, Options())}, Options()).metrics

    assert metrics["rollout_drift"].item() == pytest.approx(0, abs=1e-6)
    assert metrics["teacher_critic_gap"].item() > 0.1
    assert metrics["generated_mean"].item() == pytest.approx(batch.clean.mean().item(), abs=1e-5)
