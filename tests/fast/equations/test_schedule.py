"""Noise levels follow the shifted law within their bounds, and none piles up at a bound."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from miles_dmd.equations import shift_sigma, timestep_shift, truncated_shifted_sigma, unshift_sigma

SHIFTS = st.floats(1, 12)


def _uniform(n, seed=0):
    return torch.rand(n, generator=torch.Generator().manual_seed(seed))


def test_the_four_step_grid_at_shift_three_is_the_published_one():
    grid = shift_sigma(torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0]), 3.0)

    assert_close(grid, torch.tensor([1.0, 0.9, 0.75, 0.5, 0.0]))


@given(st.floats(0, 1), SHIFTS)
def test_unshift_inverts_shift(u, shift):
    u = torch.tensor([u])

    assert_close(unshift_sigma(shift_sigma(u, shift), shift), u, atol=1e-5, rtol=1e-5)


@given(SHIFTS)
def test_the_shift_keeps_both_ends_and_the_order(shift):
    shifted = shift_sigma(torch.linspace(0, 1, 50), shift)

    assert shifted[0] == 0
    assert_close(shifted[-1], torch.tensor(1.0))
    assert (shifted.diff() > 0).all()


@pytest.mark.parametrize("steps", [1000, 500, 1.0])
def test_a_timestep_is_shifted_in_units_of_the_models_own_range(steps):
    t = torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0]) * steps

    assert_close(timestep_shift(t, 3.0, steps), torch.tensor([1.0, 0.9, 0.75, 0.5, 0.0]) * steps)


@pytest.mark.parametrize("shift", [1.0, 3.0, 8.0])
def test_draws_follow_the_shifted_law_given_that_it_lies_within_the_bounds(shift):
    low, high, n = 0.02, 0.98, 40_000
    drawn = truncated_shifted_sigma(_uniform(n), low, high, shift).double().sort().values
    wide = shift_sigma(_uniform(4 * n, seed=1), shift).double()
    reference = wide[(wide > low) & (wide < high)].sort().values

    def share_below(sample, at):
        return torch.searchsorted(sample, at).double() / len(sample)

    # the two-sample Kolmogorov-Smirnov statistic; its 0.1 % point here is 1.95 sqrt(1/n + 1/m) = .011
    gap = (share_below(drawn, reference) - share_below(reference, reference)).abs().max()

    assert gap < 1.95 * (1 / len(drawn) + 1 / len(reference)) ** 0.5


@pytest.mark.parametrize("shift", [1.0, 3.0, 8.0])
@pytest.mark.parametrize("bounds", [(0.02, 0.98), (0.0, 1.0), (0.5, 0.51)])
def test_no_value_is_drawn_more_often_than_chance_and_none_at_a_bound(shift, bounds):
    low, high = bounds
    n = 40_000
    drawn = truncated_shifted_sigma(_uniform(n), low, high, shift)
    width = (high - low) / 1000

    assert (drawn.double() > low).all()
    assert (drawn.double() < high).all()
    for near in ((drawn - low) < width, (high - drawn) < width):
        # a thousandth of the interval next to a bound: up to shift times a thousandth of the mass, never a percent
        assert near.float().mean() < 2 * shift / 1000


@given(st.floats(0, 0.4), st.floats(0.5, 1), SHIFTS)
def test_the_ends_of_u_stay_within_the_open_interval(low, high, shift):
    u = torch.tensor([0.0, 2.0**-24, 0.5, 1 - 2.0**-24, 1.0])

    sigma = truncated_shifted_sigma(u, low, high, shift).double()

    assert (sigma > low).all()
    assert (sigma < high).all()
    assert (sigma.diff() > -1e-6).all()


def test_half_inputs_are_computed_and_returned_in_fp32():
    u = _uniform(100).bfloat16()

    results = [shift_sigma(u, 3.0), unshift_sigma(u, 3.0), timestep_shift(u, 3.0, 1.0)]
    results.append(truncated_shifted_sigma(u, 0.02, 0.98, 3.0))

    assert {result.dtype for result in results} == {torch.float32}
    assert torch.equal(results[0], shift_sigma(u.float(), 3.0))
    assert torch.equal(results[3], truncated_shifted_sigma(u.float(), 0.02, 0.98, 3.0))


@pytest.mark.parametrize("shift", [0.0, -3.0, 0.5, float("inf"), float("nan")])
def test_a_shift_that_is_none_is_refused_everywhere(shift):
    u = _uniform(3)

    for refused in (
        lambda: shift_sigma(u, shift),
        lambda: unshift_sigma(u, shift),
        lambda: timestep_shift(u, shift, 1000),
        lambda: truncated_shifted_sigma(u, 0.02, 0.98, shift),
    ):
        with pytest.raises(ValueError, match="shift must be a finite number of at least 1"):
            refused()


@pytest.mark.parametrize("steps", [0, -1000, float("inf"), float("nan")])
def test_a_number_of_timesteps_that_is_none_is_refused(steps):
    with pytest.raises(ValueError, match="num_train_timesteps"):
        timestep_shift(_uniform(3), 3.0, steps)


@pytest.mark.parametrize(("low", "high"), [(0.98, 0.02), (0.5, 0.5), (-0.1, 0.9), (0.1, 1.1), (float("nan"), 0.9)])
def test_bounds_out_of_order_are_refused(low, high):
    with pytest.raises(ValueError, match="low < high"):
        truncated_shifted_sigma(_uniform(3), low, high, 3.0)


@pytest.mark.parametrize("u", [-0.1, 1.1, float("nan")])
def test_a_u_that_is_not_uniform_on_the_unit_interval_is_refused(u):
    with pytest.raises(ValueError, match="u must lie"):
        truncated_shifted_sigma(torch.tensor([0.5, u]), 0.02, 0.98, 3.0)
