"""Guidance is written in one way, and the other way's numbers are converted."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from miles_dmd.equations import legacy_cfg, standard_cfg


def _pair(*shape, seed=0):
    return torch.randn(2, *(shape or (3, 4, 5)), generator=torch.Generator().manual_seed(seed))


@given(st.floats(-3, 12), st.integers(0, 99))
def test_standard_guidance_is_u_plus_s_times_the_difference(scale, seed):
    cond, uncond = _pair(seed=seed)

    assert_close(standard_cfg(cond, uncond, scale), uncond + scale * (cond - uncond), atol=1e-4, rtol=1e-4)


@given(st.floats(-3, 12), st.integers(0, 99))
def test_legacy_guidance_w_is_standard_guidance_w_plus_one(w, seed):
    cond, uncond = _pair(seed=seed)

    assert_close(legacy_cfg(cond, uncond, w), cond + w * (cond - uncond), atol=1e-4, rtol=1e-4)
    assert torch.equal(legacy_cfg(cond, uncond, w), standard_cfg(cond, uncond, w + 1))


def test_the_same_number_means_two_things_in_the_two_forms():
    cond, uncond = _pair()

    assert not torch.allclose(legacy_cfg(cond, uncond, 3.5), standard_cfg(cond, uncond, 3.5), atol=0.1)


def test_scale_one_is_exactly_conditional_and_scale_zero_exactly_unconditional():
    cond, uncond = _pair()

    assert torch.equal(standard_cfg(cond, uncond, 1.0), cond)
    assert torch.equal(standard_cfg(cond, uncond, 0.0), uncond)


def test_layer_norm_gives_each_last_axis_the_conditional_length():
    cond, uncond = _pair()

    guided = standard_cfg(cond, uncond, 4.0, norm="layer_norm")

    assert_close(guided.norm(dim=-1), cond.norm(dim=-1))
    assert_close(
        guided / guided.norm(dim=-1, keepdim=True),
        torch.nn.functional.normalize(uncond + 4.0 * (cond - uncond), dim=-1),
    )


def test_scalar_norm_is_one_ratio_over_the_whole_tensor():
    cond, uncond = _pair()

    guided, plain = standard_cfg(cond, uncond, 4.0, norm="scalar"), standard_cfg(cond, uncond, 4.0)

    assert_close(guided.norm(), cond.norm())
    assert_close(guided, plain * (cond.norm() / plain.norm()))


def test_scalar_norm_never_lengthens_and_layer_norm_does():
    cond = torch.ones(2, 3)

    # halfway between a vector and its opposite tenth, the guided prediction is shorter than the conditional one
    scalar, layer = (standard_cfg(cond, -0.1 * cond, 0.5, norm=norm) for norm in ("scalar", "layer_norm"))

    assert_close(scalar, 0.45 * cond)
    assert_close(layer, cond)


def test_only_the_scalar_norm_depends_on_who_else_is_in_the_batch():
    cond, uncond = _pair(4, 6)

    def split(norm):
        halves = [standard_cfg(cond[rows], uncond[rows], 4.0, norm) for rows in (slice(2), slice(2, 4))]
        return torch.cat(halves), standard_cfg(cond, uncond, 4.0, norm)

    assert torch.equal(*split("none"))
    assert torch.equal(*split("layer_norm"))
    assert not torch.allclose(*split("scalar"), atol=1e-3)


def test_a_guided_prediction_of_length_zero_stays_finite():
    cond = torch.ones(2, 3)

    for norm in ("layer_norm", "scalar"):
        assert torch.equal(standard_cfg(cond, -cond, 0.5, norm=norm), torch.zeros(2, 3))


@pytest.mark.parametrize("norm", ["none", "layer_norm", "scalar"])
def test_half_inputs_are_computed_and_returned_in_fp32(norm):
    cond, uncond = _pair().bfloat16()

    guided = standard_cfg(cond, uncond, 4.0, norm)

    assert guided.dtype == legacy_cfg(cond, uncond, 3.0).dtype == torch.float32
    assert torch.equal(guided, standard_cfg(cond.float(), uncond.float(), 4.0, norm))


def test_unknown_norms_other_shapes_and_scales_that_are_not_finite_are_refused():
    cond, uncond = _pair()

    with pytest.raises(ValueError, match="unknown norm 'rms'"):
        standard_cfg(cond, uncond, 4.0, norm="rms")
    with pytest.raises(ValueError, match="shapes differ"):
        standard_cfg(cond, uncond[:1], 4.0)
    with pytest.raises(ValueError, match="finite"):
        standard_cfg(cond, uncond, float("nan"))
