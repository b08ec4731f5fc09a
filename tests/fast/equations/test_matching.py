"""The student's gradient is g / N, masks count, and nothing that is not finite hides."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from miles_dmd.equations import (
    dmd_gradient,
    dmd_surrogate_loss,
    fake_score_loss,
    fake_score_target,
    ode_regression_loss,
    velocity_to_x0,
)

NAN, INF = float("nan"), float("inf")


def _three(*shape, seed=0):
    return torch.randn(3, *(shape or (4, 2, 3, 3)), generator=torch.Generator().manual_seed(seed))


class TinyStudent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 4))

    def forward(self, z):
        return self.net(z)


# --- direction and normaliser


def test_the_gradient_is_fake_minus_real_over_the_samples_own_mean_distance_to_real():
    x_gen, real, fake = _three()

    gradient, normaliser, nonfinite = dmd_gradient(x_gen, real, fake, 1e-5)

    for number in range(4):
        scale = (x_gen[number] - real[number]).abs().mean()
        assert_close(normaliser[number].squeeze(), scale)
        assert_close(gradient[number], (fake[number] - real[number]) / scale)
    assert normaliser.shape == (4, 1, 1, 1)
    assert nonfinite == 0
    assert nonfinite.dtype == torch.int64


def test_stepping_against_the_gradient_moves_from_fake_towards_real():
    x_gen, real, _ = _three()
    x_gen = x_gen.requires_grad_()

    gradient, _, _ = dmd_gradient(x_gen, real, x_gen.detach(), 1e-5)
    dmd_surrogate_loss(x_gen, gradient).backward()
    stepped = x_gen.detach() - 0.1 * x_gen.grad

    assert (stepped - real).norm() < (x_gen.detach() - real).norm()


@given(st.integers(1, 3))
def test_a_sample_does_not_depend_on_who_else_is_in_the_batch(cut):
    tensors = _three()

    whole, _, _ = dmd_gradient(*tensors, 1e-5)
    parts = [dmd_gradient(*(t[rows] for t in tensors), 1e-5)[0] for rows in (slice(cut), slice(cut, None))]

    assert torch.equal(torch.cat(parts), whole)


def test_the_floor_holds_where_the_sample_already_is_the_real_prediction():
    x_gen, _, fake = _three()

    gradient, normaliser, nonfinite = dmd_gradient(x_gen, x_gen, fake, 1e-2)

    assert_close(gradient, (fake - x_gen) / 1e-2)
    assert normaliser.abs().max() == 0
    assert nonfinite == 0


def test_equal_predictions_give_no_gradient_at_all():
    x_gen, real, _ = _three()

    assert dmd_gradient(x_gen, real, real, 1e-5)[0].abs().max() == 0


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_entries_that_are_not_finite_are_counted_and_not_hidden(which, bad):
    tensors = _three()
    tensors[which, 1, 0, 2, 2] = bad

    gradient, normaliser, nonfinite = dmd_gradient(*tensors, 1e-5)

    # a bad sample or real prediction spoils its whole normaliser (18 entries), a bad fake one only its own entry
    assert nonfinite == (1 if which == 2 else 18)
    assert gradient[[0, 2, 3]].isfinite().all()
    assert not (gradient[1].isfinite() & normaliser[1].isfinite()).all()


def test_a_surrogate_of_a_bad_gradient_is_itself_not_finite():
    x_gen, real, fake = _three()
    fake[0, 0, 0, 0] = NAN

    gradient, _, _ = dmd_gradient(x_gen, real, fake, 1e-5)

    assert not dmd_surrogate_loss(x_gen, gradient).isfinite()


def test_invariant_15_no_graph_leaves_the_direction():
    x_gen, real, fake = (tensor.clone().requires_grad_() for tensor in _three())

    results = dmd_gradient(x_gen, real, fake, 1e-5)

    assert not any(result.requires_grad for result in results)


@pytest.mark.parametrize("eps", [0.0, -1e-5, INF, NAN])
def test_a_floor_that_is_none_is_refused(eps):
    with pytest.raises(ValueError, match="floor"):
        dmd_gradient(*_three(), eps)


def test_samples_without_further_axes_and_other_shapes_are_refused():
    x_gen, real, fake = _three()

    with pytest.raises(ValueError, match=r"\[B, ...\]"):
        dmd_gradient(*_three(4), 1e-5)
    with pytest.raises(ValueError, match=r"\[B, ...\]"):
        dmd_gradient(*_three(0, 3), 1e-5)
    with pytest.raises(ValueError, match="shapes differ"):
        dmd_gradient(x_gen, real[:1], fake, 1e-5)


# --- surrogate


def test_the_surrogates_gradient_is_exactly_g_over_n():
    x_gen, gradient, _ = _three()
    x_gen = (1000 * x_gen).requires_grad_()  # large samples, where x - (x - g) would round g away
    small = 1e-4 * gradient

    loss = dmd_surrogate_loss(x_gen, small)
    loss.backward()

    assert_close(x_gen.grad, small / small.numel(), rtol=1e-6, atol=0)
    assert_close(loss, 0.5 * small.square().mean())


def test_parameters_get_the_jacobian_transposed_times_g_over_n():
    student, z = TinyStudent(), _three(6, 3)[0]
    gradient = _three(6, 4)[1]
    x_gen = student(z)
    expected = torch.autograd.grad(x_gen, list(student.parameters()), gradient / gradient.numel(), retain_graph=True)

    found = torch.autograd.grad(dmd_surrogate_loss(x_gen, gradient), list(student.parameters()))

    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)


def test_invariant_14_parameters_gradient_is_the_finite_difference_with_the_target_held_fixed():
    student, z = TinyStudent(), _three(6, 3)[0]
    gradient, step = _three(6, 4)[1], 1e-2
    parameters = list(student.parameters())
    target = (student(z) - gradient).detach()
    found = torch.autograd.grad(dmd_surrogate_loss(student(z), gradient), parameters)

    @torch.no_grad()
    def loss_moved(entry, by):
        entry += by
        x_gen = student(z)
        loss = dmd_surrogate_loss(x_gen, x_gen - target)  # the gradient that keeps sg(x - g) where it was
        entry -= by
        return loss

    for parameter, slope in zip(parameters, found, strict=True):
        flat = parameter.data.view(-1)
        numeric = torch.stack([(loss_moved(e, step) - loss_moved(e, -step)) / (2 * step) for e in flat])
        assert_close(numeric, slope.view(-1), atol=2e-4, rtol=2e-3)


def test_the_surrogate_detaches_its_gradient():
    x_gen, gradient, _ = (tensor.clone().requires_grad_() for tensor in _three())

    dmd_surrogate_loss(x_gen, gradient).backward()

    assert gradient.grad is None
    assert x_gen.grad is not None


def test_a_mask_scales_active_entries_by_the_count_and_leaves_the_normaliser_alone():
    x_gen, real, fake = _three()
    gradient, _, _ = dmd_gradient(x_gen, real, fake, 1e-5)
    everything, half = torch.ones(4, 2, dtype=torch.bool), torch.tensor([[True, False]] * 4)

    def slope(mask):
        x = x_gen.clone().requires_grad_()
        dmd_surrogate_loss(x, gradient, mask).backward()
        return x.grad

    assert_close(slope(everything), slope(None))
    assert_close(slope(half)[:, 0], 2 * slope(None)[:, 0])
    assert slope(half)[:, 1].abs().max() == 0


# --- fake score and ODE regression


def test_the_fake_target_is_noise_minus_sample_and_the_true_velocity_has_no_loss():
    x_gen, noise, _ = _three()

    target = fake_score_target(x_gen, noise)

    assert torch.equal(target, noise - x_gen)
    assert fake_score_loss(noise - x_gen, target) == 0


def test_invariant_15_fake_target_and_its_loss_detach_all_but_the_prediction():
    x_gen, noise, prediction = (tensor.clone().requires_grad_() for tensor in _three())

    assert not fake_score_target(x_gen, noise).requires_grad
    for loss in (fake_score_loss(prediction, x_gen), ode_regression_loss(prediction, x_gen, torch.ones(4))):
        loss.backward()
    assert prediction.grad is not None
    assert x_gen.grad is None
    assert noise.grad is None


def test_velocity_error_is_x0_error_over_sigma_squared():
    x, velocity, target = _three()
    sigma = 0.4

    x0_error = (velocity_to_x0(x, velocity, sigma) - velocity_to_x0(x, target, sigma)).square().mean()

    assert_close(fake_score_loss(velocity, target), x0_error / sigma**2)


# --- what the three losses share

LOSSES = {
    "dmd_surrogate_loss": (dmd_surrogate_loss, lambda x, g: 0.5 * g.square()),
    "fake_score_loss": (fake_score_loss, lambda x, t: (x - t).square()),
    "ode_regression_loss": (ode_regression_loss, lambda x, t: (x - t).square()),
}
each_loss = pytest.mark.parametrize(("loss", "entries"), LOSSES.values(), ids=LOSSES)


@each_loss
@pytest.mark.parametrize("shape", [(4,), (4, 2), (4, 2, 3), (4, 2, 3, 3), (4, 1, 3, 1), (1, 2)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int64])
def test_a_masked_loss_is_the_mean_over_active_entries(loss, entries, shape, dtype):
    x, y, _ = _three(seed=3)
    mask = (torch.rand(shape, generator=torch.Generator().manual_seed(len(shape))) > 0.4).to(dtype)
    mask.view(-1)[0] = 1
    full = mask.bool().reshape(*shape, *[1] * (4 - len(shape))).expand(4, 2, 3, 3)

    assert_close(loss(x, y, mask), entries(x, y)[full].mean())


@each_loss
def test_a_mask_of_ones_changes_nothing(loss, entries):
    x, y, _ = _three()

    assert_close(loss(x, y, torch.ones(4)), entries(x, y).mean())


@each_loss
def test_what_is_masked_reaches_neither_loss_nor_gradient_even_when_it_is_not_finite(loss, entries):
    x, y, _ = _three()
    clean = loss(x, y, torch.tensor([0, 1, 1, 1]))
    y[0], x = NAN, x.requires_grad_()

    masked = loss(x, y, torch.tensor([0, 1, 1, 1]))
    masked.backward()

    assert_close(masked, clean)
    assert x.grad.isfinite().all()
    assert x.grad[0].abs().max() == 0


@each_loss
def test_an_all_masked_loss_is_an_error_and_never_zero(loss, entries):
    x, y, _ = _three()

    with pytest.raises(ValueError, match="no active entry"):
        loss(x, y, torch.zeros(4, 2))


@each_loss
@pytest.mark.parametrize("shape", [(2,), (3,), (4, 3), (2, 3, 3), (4, 2, 3, 3, 1), ()])
def test_a_mask_that_does_not_fit_the_leading_axes_is_refused(loss, entries, shape):
    x, y, _ = _three()

    with pytest.raises(ValueError, match="does not fit"):
        loss(x, y, torch.ones(shape))


@each_loss
@pytest.mark.parametrize("value", [0.5, 2.0, -1.0, NAN])
def test_a_mask_is_no_weight(loss, entries, value):
    x, y, _ = _three()

    with pytest.raises(ValueError, match="0 and 1"):
        loss(x, y, torch.full((4,), value))


@each_loss
def test_invariant_13_half_inputs_are_computed_and_returned_in_fp32_and_gradients_come_back_in_half(loss, entries):
    x, y, _ = _three().bfloat16()
    x = x.requires_grad_()

    value = loss(x, y, torch.ones(4))
    value.backward()

    assert value.dtype == torch.float32
    assert_close(value, entries(x.float(), y.float()).mean())
    assert x.grad.dtype == torch.bfloat16


@each_loss
def test_tensors_of_other_shapes_are_refused_and_not_broadcast(loss, entries):
    x, y, _ = _three()

    with pytest.raises(ValueError, match="shapes differ"):
        loss(x, y[:1], torch.ones(4))


@pytest.mark.parametrize("loss", [dmd_surrogate_loss, fake_score_loss])
def test_a_loss_over_an_empty_batch_is_an_error(loss):
    with pytest.raises(ValueError, match="no entries"):
        loss(torch.zeros(0, 3), torch.zeros(0, 3))


def test_the_direction_of_half_inputs_is_that_of_their_fp32_copies():
    tensors = _three().bfloat16()

    halves, singles = dmd_gradient(*tensors, 1e-5), dmd_gradient(*tensors.float(), 1e-5)

    assert [half.dtype for half in halves] == [torch.float32, torch.float32, torch.int64]
    assert all(torch.equal(half, single) for half, single in zip(halves, singles, strict=True))
