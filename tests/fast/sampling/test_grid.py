"""The few-step grid: equally spaced, shifted once."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_dmd.errors import ConfigError, PlanError
from miles_dmd.sampling.grid import shifted, sigma_grid


@pytest.mark.parametrize(
    ("num_steps", "shift", "sigmas"),
    [
        (4, 3.0, (1.0, 0.9, 0.75, 0.5)),
        (4, 5.0, (1.0, 0.9375, 0.8333, 0.625)),
        (8, 3.0, (1.0, 0.9545, 0.9, 0.8333, 0.75, 0.6429, 0.5, 0.3)),
        (4, 1, (1.0, 0.75, 0.5, 0.25)),
        (1, 3.0, (1.0,)),
    ],
)
def test_the_grid_is_that_of_the_literature(num_steps, shift, sigmas):
    assert sigma_grid(num_steps, shift) == pytest.approx(sigmas, abs=5e-5)


def test_four_steps_at_shift_three_are_exact():
    assert sigma_grid(4, 3.0) == (1.0, 0.9, 0.75, 0.5)


@given(num_steps=st.integers(1, 50), shift=st.floats(0.1, 20))
def test_the_grid_falls_from_one_and_stays_above_zero(num_steps, shift):
    sigmas = sigma_grid(num_steps, shift)

    assert sigmas[0] == pytest.approx(1)
    assert all(0 < low < high <= 1 + 1e-12 for high, low in itertools.pairwise(sigmas))


def test_a_shift_keeps_the_ends():
    assert (shifted(0.0, 3.0), shifted(1.0, 3.0)) == (0.0, 1.0)


@pytest.mark.parametrize("shift", [0, -1.0, math.nan, math.inf, True, "3"])
def test_a_shift_that_is_no_positive_number_is_refused(shift):
    with pytest.raises(ConfigError, match="--shift"):
        sigma_grid(4, shift)


@pytest.mark.parametrize("num_steps", [0, -1, 4.0, True, "4"])
def test_the_number_of_steps_is_a_whole_number(num_steps):
    with pytest.raises(PlanError, match="--num-inference-steps must be a whole number of at least 1"):
        sigma_grid(num_steps, 3.0)
