"""Distances between samples, and their size, against numbers worked out by hand."""

import pytest
import torch

from miles_dmd.modalities.diffusion.statistics import HEADROOM, extent, mean_pairwise_distance, share_beyond, statistics


def test_distance_is_the_root_mean_square_over_values_averaged_over_pairs():
    samples = torch.stack([torch.full((2, 3, 3), value) for value in (0.0, 1.0, 3.0)])

    assert mean_pairwise_distance(samples) == pytest.approx((1 + 3 + 2) / 3)


def test_distance_does_not_depend_on_the_size_of_the_image():
    generator = torch.Generator().manual_seed(0)

    small, large = (mean_pairwise_distance(torch.randn(40, 4, n, n, generator=generator)) for n in (8, 32))

    assert small == pytest.approx(2**0.5, rel=0.02)  # of two independent unit normals
    assert large == pytest.approx(small, rel=0.02)


def test_one_sample_has_no_distance():
    assert mean_pairwise_distance(torch.ones(1, 4)) == 0


def test_spread_compares_seeds_of_one_prompt_only():
    samples = torch.tensor([[0.0], [0.0], [100.0], [102.0]])

    assert statistics(samples, [5, 5, 9, 9]).spread == pytest.approx((0 + 2) / 2)


def test_extent_leaves_one_value_in_a_thousand_outside():
    samples = torch.arange(-5000, 5000).float()

    assert share_beyond(samples, extent(samples)) == pytest.approx(1e-3, abs=2e-4)


def test_first_samples_set_the_limit_for_later_ones():
    first = statistics(torch.linspace(-2, 2, 4001).unsqueeze(1), [0] * 4001)
    later = torch.full((4, 10), 1.0)
    later[0, :4] = 10.0

    then = statistics(later, [0, 0, 1, 1], first.limit)

    assert first.limit == pytest.approx(2 * HEADROOM, rel=0.01)
    assert first.saturation == 0
    assert then.limit == first.limit
    assert then.saturation == pytest.approx(4 / 40)
