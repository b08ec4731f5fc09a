"""Clean sample, noise and velocity can be told from one another at any noise level."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from miles_dmd import equations as eq

SHAPES = st.sampled_from([(3, 4), (2, 3, 4, 4), (1, 2), (4, 2, 3)])
SEEDS = st.integers(0, 999)


def _draw(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    x0, noise = torch.randn(2, *shape, generator=generator)
    return x0, noise, torch.rand(shape[0], generator=generator)


def _column(sigma, x):
    return sigma.reshape(-1, *[1] * (x.ndim - 1))


@given(SHAPES, SEEDS)
def test_x0_is_recovered_from_the_true_velocity(shape, seed):
    x0, noise, sigma = _draw(shape, seed)

    recovered = eq.velocity_to_x0(eq.add_noise(x0, noise, sigma), noise - x0, sigma)

    assert_close(recovered, x0, atol=1e-5, rtol=1e-5)


@given(SHAPES, SEEDS)
def test_x0_is_recovered_from_the_true_noise(shape, seed):
    x0, noise, sigma = _draw(shape, seed)
    sigma = sigma * 0.99

    recovered = eq.epsilon_to_x0(eq.add_noise(x0, noise, sigma), noise, 1 - sigma, sigma)

    assert_close(recovered, x0, atol=1e-4, rtol=1e-4)


@given(SHAPES, SEEDS)
def test_x0_is_recovered_from_the_true_v_prediction(shape, seed):
    x0, noise, angle = _draw(shape, seed)
    alpha, sigma = angle.cos(), angle.sin()
    a, s = _column(alpha, x0), _column(sigma, x0)

    recovered = eq.v_prediction_to_x0(a * x0 + s * noise, a * noise - s * x0, alpha, sigma)

    assert_close(recovered, x0, atol=1e-5, rtol=1e-5)


@given(SHAPES, SEEDS)
def test_an_euler_step_along_the_true_velocity_stays_on_the_path(shape, seed):
    x0, noise, sigma = _draw(shape, seed)
    sigma_to = sigma * 0.3

    stepped = eq.ode_euler_step(eq.add_noise(x0, noise, sigma), noise - x0, sigma, sigma_to)

    assert_close(stepped, eq.add_noise(x0, noise, sigma_to), atol=1e-5, rtol=1e-5)


def test_an_euler_step_to_zero_is_the_clean_prediction():
    x, velocity, sigma = _draw((2, 3, 4), 0)

    assert_close(eq.ode_euler_step(x, velocity, sigma, 0.0), eq.velocity_to_x0(x, velocity, sigma))


def test_renoising_forgets_the_old_noise_and_euler_keeps_it():
    x0, noise, sigma = _draw((2, 3, 4), 1)
    fresh = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(2))
    x = eq.add_noise(x0, noise, sigma)

    euler, renoised = eq.ode_euler_step(x, noise - x0, sigma, 0.5), eq.consistency_renoise_step(x0, fresh, 0.5)

    assert_close(renoised, 0.5 * x0 + 0.5 * fresh)
    assert_close(euler, 0.5 * x0 + 0.5 * noise)
    assert not torch.allclose(euler, renoised, atol=0.1)


def test_renoising_to_zero_is_the_clean_sample_and_to_one_is_the_noise():
    x0, noise, _ = _draw((2, 3), 3)

    assert torch.equal(eq.consistency_renoise_step(x0, noise, 0.0), x0)
    assert torch.equal(eq.consistency_renoise_step(x0, noise, 1.0), noise)


CONVERSIONS = {
    "add_noise": lambda x, y, s: eq.add_noise(x, y, s),
    "velocity_to_x0": lambda x, y, s: eq.velocity_to_x0(x, y, s),
    "epsilon_to_x0": lambda x, y, s: eq.epsilon_to_x0(x, y, 1 - s.float(), s),
    "v_prediction_to_x0": lambda x, y, s: eq.v_prediction_to_x0(x, y, (1 - s.float() ** 2) ** 0.5, s),
    "ode_euler_step": lambda x, y, s: eq.ode_euler_step(x, y, s, s * 0.5),
    "consistency_renoise_step": lambda x, y, s: eq.consistency_renoise_step(x, y, s),
}


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_invariant_13_half_inputs_are_computed_and_returned_in_fp32(convert, dtype):
    x, y, sigma = (tensor.to(dtype) for tensor in _draw((2, 3, 4), 4))

    result = convert(x, y, sigma)

    assert result.dtype == torch.float32
    assert torch.equal(result, convert(x.float(), y.float(), sigma.float()))


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
def test_a_level_per_sample_goes_along_the_batch_and_never_along_the_last_axis(convert):
    x, y, sigma = _draw((3, 3, 3), 5)

    together = convert(x, y, sigma)

    for number in range(3):
        assert_close(
            together[number : number + 1], convert(x[number : number + 1], y[number : number + 1], sigma[number])
        )
    assert torch.equal(together, convert(x, y, sigma.reshape(3, 1, 1)))


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
@pytest.mark.parametrize("shape", [(2,), (4,), (3, 1), (1, 3, 4, 1), (3, 2, 4)])
def test_a_level_of_another_shape_is_refused(convert, shape):
    x, y, _ = _draw((3, 3, 4), 6)

    with pytest.raises(ValueError, match="does not fit"):
        convert(x, y, torch.full(shape, 0.5))


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
def test_tensors_of_different_shapes_are_refused_and_not_broadcast(convert):
    x, _, sigma = _draw((3, 4), 7)

    with pytest.raises(ValueError, match="shapes differ"):
        convert(x, torch.zeros(1, 4), sigma)


@pytest.mark.parametrize("alpha", [0.0, 1e-6, -1e-4, float("nan")])
def test_an_alpha_too_small_to_divide_by_is_refused_even_for_one_sample(alpha):
    x, epsilon, sigma = _draw((2, 3), 8)

    with pytest.raises(ValueError, match="too small to divide by"):
        eq.epsilon_to_x0(x, epsilon, torch.tensor([0.5, alpha]), sigma)


def test_x0_from_noise_is_right_to_four_digits_at_the_least_alpha():
    x0, noise, _ = (tensor.double() for tensor in _draw((2, 500), 9))
    x = 0.001 * x0 + 0.999 * noise

    recovered = eq.epsilon_to_x0(x, noise, 0.001, 0.999)

    assert (recovered - x0).norm() / x0.norm() < 1e-4


def test_levels_that_are_no_variance_preserving_pair_are_refused_for_a_v_prediction():
    x, v, _ = _draw((2, 3), 10)

    with pytest.raises(ValueError, match="velocity_to_x0"):
        eq.v_prediction_to_x0(x, v, 0.5, 0.5)


def test_invariant_13_the_difference_of_two_clean_predictions_survives_in_fp32_and_not_in_bf16():
    # two scores that differ by 1 % at sigma .9: the signal of distribution matching
    x0, noise, _ = (tensor.double() for tensor in _draw((4, 16, 8, 8), 11))
    real, sigma = noise - x0, 0.9
    fake = real + 0.01 * torch.randn(real.shape, generator=torch.Generator().manual_seed(12), dtype=torch.float64)
    x = (1 - sigma) * x0 + sigma * noise
    true = (x - sigma * fake) - (x - sigma * real)

    def error(difference):
        return ((difference.double() - true).norm() / true.norm()).item()

    ours = eq.velocity_to_x0(x, fake, sigma) - eq.velocity_to_x0(x, real, sigma)
    half = [(x.bfloat16() - sigma * velocity.float().bfloat16()).bfloat16() for velocity in (fake, real)]

    assert error(ours) < 1e-4
    assert error(half[0].float() - half[1].float()) > 0.1
