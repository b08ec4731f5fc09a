"""Expected value and gradient of the token losses, by enumeration of every action in fp64."""

import math

import pytest
import torch
from torch.testing import assert_close

from miles_dmd.equations.tokens import LOSSES, head_overlap, resopd_loss, tail_logprob, token_loss

SEEDS = 12
CASES = [(V, k) for V in (3, 5, 8, 12) for k in range(1, V + 1)]
each_size = pytest.mark.parametrize(("V", "k"), CASES, ids=lambda value: str(value))
each_baseline = pytest.mark.parametrize("baseline", ["none", "bucket"])


class Enumerated:
    """Every action of SEEDS rows at once: tensors are [SEEDS, V, ...], with the action along the second axis."""

    def __init__(self, V, k, *, top=True, seed=0):
        generator = torch.Generator().manual_seed(1000 * V + 10 * k + seed)
        self.logits, other = 2 * torch.randn(2, SEEDS, V, generator=generator, dtype=torch.float64)
        self.log_q = other.log_softmax(-1)
        self.log_p = self.logits.log_softmax(-1)
        ranked = self.log_q if top else torch.rand(SEEDS, V, generator=generator)
        self.head = ranked.topk(k).indices
        self.actions = torch.arange(V).expand(SEEDS, V)
        self.hit = (self.head[:, None, :] == self.actions[:, :, None]).any(2)
        self.generator, self.V, self.k = generator, V, k

    @property
    def r(self):
        return self.log_p - self.log_q

    @property
    def kl(self):
        return (self.log_p.exp() * self.r).sum(-1)

    @property
    def kl_gradient(self):
        return self.log_p.exp() * (self.r - self.kl[:, None])

    def per_row(self):
        """One random number a row, the same for all its actions."""
        return torch.rand(SEEDS, 1, generator=self.generator, dtype=torch.float64).expand(SEEDS, self.V)

    def inputs(self, head=None):
        head = self.head[:, None].expand(-1, self.V, -1) if head is None else head
        log_q = self.log_q[:, None].expand(-1, self.V, -1)
        tensors = (head, log_q.gather(2, head), self.actions, self.log_q)
        return tuple(tensor.flatten(0, 1) for tensor in tensors)

    def evaluate(self, name="resopd", head=None, **options):
        """(loss [SEEDS, V], gradient [SEEDS, V, V], metrics)."""
        logits = self.logits[:, None].expand(-1, self.V, -1).flatten(0, 1).requires_grad_()
        options = {key: value.flatten() if torch.is_tensor(value) else value for key, value in options.items()}
        loss, metrics = token_loss(name, logits, *self.inputs(head), **options)
        (gradient,) = torch.autograd.grad(loss.sum(), logits)
        shape = (SEEDS, self.V)
        metrics = {key: value.reshape(shape) for key, value in metrics.items()}
        return loss.detach().reshape(shape), gradient.reshape(*shape, self.V), metrics


def mean(probabilities, values):
    return (probabilities.reshape(*probabilities.shape, *[1] * (values.ndim - 2)) * values).sum(1)


def exactly(found, expected):
    assert_close(found, expected, rtol=0, atol=1e-12)


# --- ResOPD is unbiased


@each_size
@each_baseline
@pytest.mark.parametrize("top", [True, False], ids=["top-k", "any head"])
def test_expected_value_and_gradient_over_all_actions_are_those_of_the_full_reverse_kl(V, k, baseline, top):
    case = Enumerated(V, k, top=top)

    loss, gradient, _ = case.evaluate(residual_baseline=baseline)

    exactly(mean(case.log_p.exp(), gradient), case.kl_gradient)
    exactly(mean(case.log_p.exp(), loss), case.kl)


@each_size
@each_baseline
def test_gradient_of_every_action_is_the_closed_form(V, k, baseline):
    case = Enumerated(V, k)
    w = 0.5 + case.per_row()
    p, in_head = case.log_p.exp(), torch.zeros(SEEDS, V).scatter(1, case.head, 1).bool()
    tau = p.where(~in_head, 0).sum(1, keepdim=True)
    tau_q = case.log_q.exp().where(~in_head, 0).sum(1, keepdim=True)
    L = (tau / tau_q).log() if k < V else torch.zeros(SEEDS, 1)
    coarse = (p * case.r).where(in_head, 0).sum(1, keepdim=True) + tau * L
    c = L if baseline == "bucket" else torch.zeros_like(L)
    rho = torch.where(in_head, case.r, L)
    s_tail = (p / tau).where(~in_head, 0) - p
    sampled = (w * ~case.hit)[:, :, None] * (
        (case.r - c)[:, :, None] * (torch.eye(V) - p[:, None]) - ((L - c) * s_tail)[:, None]
    ).where(~case.hit[:, :, None], 0)

    loss, gradient, _ = case.evaluate(residual_baseline=baseline, importance_weight=w)

    exactly(gradient, (p * (rho - coarse))[:, None] + sampled)
    exactly(loss, coarse + torch.where(case.hit, 0, w * (case.r - L)))


@each_size
@each_baseline
def test_any_control_coefficient_that_does_not_depend_on_the_action_keeps_it_unbiased(V, k, baseline):
    case = Enumerated(V, k)

    loss, gradient, _ = case.evaluate(residual_baseline=baseline, teacher_tail_logprob=-9 * case.per_row())

    exactly(mean(case.log_p.exp(), gradient), case.kl_gradient)
    exactly(mean(case.log_p.exp(), loss), case.kl)


@each_size
@each_baseline
def test_importance_weight_corrects_another_sampling_distribution_exactly(V, k, baseline):
    case = Enumerated(V, k)
    mu = torch.randn(SEEDS, V, generator=case.generator, dtype=torch.float64).softmax(-1)

    loss, gradient, _ = case.evaluate(residual_baseline=baseline, importance_weight=case.log_p.exp() / mu)

    exactly(mean(mu, gradient), case.kl_gradient)
    exactly(mean(mu, loss), case.kl)


def test_importance_weight_leaves_the_exact_part_alone():
    case = Enumerated(8, 3)

    (_, once, _), (_, thrice, _) = (case.evaluate(importance_weight=w * torch.ones(SEEDS, 8)) for w in (1.0, 3.0))

    assert torch.equal(once[case.hit], thrice[case.hit])
    assert not torch.allclose(once[~case.hit], thrice[~case.hit])


@pytest.mark.parametrize("V", [5, 9])
def test_a_head_that_contains_the_sampled_token_is_biased(V):
    """Guards against the obvious repair: with S + {A} nothing is ever sampled."""
    case = Enumerated(V, 2)
    with_action = torch.cat([case.head[:, None].expand(-1, V, -1), case.actions[:, :, None]], dim=2)
    third = case.log_q.topk(3).indices[:, None, 2:].expand(-1, V, -1)
    with_action[:, :, 2:] = torch.where(case.hit[:, :, None], third, with_action[:, :, 2:])  # distinct ids

    _, gradient, _ = case.evaluate(head=with_action)

    bias = (mean(case.log_p.exp(), gradient) - case.kl_gradient).norm(dim=1) / case.kl_gradient.norm(dim=1)
    assert bias.median() > 0.1


def test_sampling_from_a_truncated_student_is_biased_without_its_weight():
    case = Enumerated(12, 2)
    mu = case.log_p.exp().where(case.log_p > case.log_p.median(1, keepdim=True).values, 0)
    mu = mu / mu.sum(1, keepdim=True)

    _, gradient, _ = case.evaluate()

    assert ((mean(mu, gradient) - case.kl_gradient).norm(dim=1) / case.kl_gradient.norm(dim=1)).max() > 0.1


@pytest.mark.parametrize("V", [3, 5, 8, 12])
def test_a_head_of_the_whole_vocabulary_is_the_exact_reverse_kl_for_each_action(V):
    case = Enumerated(V, V)

    loss, gradient, metrics = case.evaluate()

    exactly(loss, case.kl[:, None].expand_as(loss))
    exactly(gradient, case.kl_gradient[:, None].expand_as(gradient))
    assert metrics["residual_abs"].max() == 0


def test_the_bucket_baseline_has_no_noise_where_student_and_teacher_agree_inside_the_tail():
    case = Enumerated(8, 3)
    case.log_q = case.logits.scatter_add(1, case.head, case.per_row()[:, :3]).log_softmax(-1)

    (_, published, _), (_, centred, _) = (case.evaluate(residual_baseline=name) for name in ("none", "bucket"))

    exactly(centred, case.kl_gradient[:, None].expand_as(centred))
    assert (published - case.kl_gradient[:, None]).abs().max() > 0.1


def test_many_draws_average_to_the_full_gradient():
    """The same through sampling, as in a run."""
    case = Enumerated(6, 2)
    actions = case.log_p[0].exp().multinomial(100_000, replacement=True, generator=case.generator)
    logits = case.logits[:1].expand(len(actions), -1).clone().requires_grad_()
    head = case.head[:1].expand(len(actions), -1)

    loss, _ = resopd_loss(logits, head, case.log_q[0][head], actions, case.log_q[0][actions])
    (gradient,) = torch.autograd.grad(loss.mean(), logits)

    error = 5 * gradient.mul(len(actions)).std(0) / math.sqrt(len(actions))
    assert ((gradient.sum(0) - case.kl_gradient[0]).abs() < error).all()


# --- the other two


@each_size
def test_expected_gradient_of_k2_is_that_of_the_full_reverse_kl(V, k):
    case = Enumerated(V, k)
    mu = torch.randn(SEEDS, V, generator=case.generator, dtype=torch.float64).softmax(-1)

    loss, gradient, _ = case.evaluate("sampled_k2")
    _, weighted, _ = case.evaluate("sampled_k2", importance_weight=case.log_p.exp() / mu)

    exactly(loss, case.r.square() / 2)
    exactly(mean(case.log_p.exp(), gradient), case.kl_gradient)
    exactly(mean(mu, weighted), case.kl_gradient)


@each_size
def test_forward_kl_over_head_and_tail_is_that_of_two_distributions_over_k_plus_one_classes(V, k):
    case = Enumerated(V, k)
    logits = case.logits.clone().requires_grad_()
    outside = torch.ones(SEEDS, V, dtype=torch.float64).scatter(1, case.head, 0)
    p, q = (
        torch.cat([x.softmax(1).gather(1, case.head), (x.softmax(1) * outside).sum(1, keepdim=True)], dim=1)[:, :V]
        for x in (logits, case.log_q)
    )
    expected = (q * (q / p).log()).sum(1)
    (slope,) = torch.autograd.grad(expected.sum(), logits)

    loss, gradient, _ = case.evaluate("forward_kl_topk_tail")

    exactly(loss, expected.detach()[:, None].expand_as(loss))
    exactly(gradient, slope[:, None].expand_as(gradient))
    full = (case.log_q.exp() * -case.r).sum(1)
    assert (loss <= full[:, None] + 1e-12).all()
    assert (loss >= -1e-12).all()


# --- what all share


@each_size
@pytest.mark.parametrize("name", LOSSES)
@each_baseline
def test_a_student_equal_to_its_teacher_has_neither_loss_nor_gradient(V, k, name, baseline):
    case = Enumerated(V, k)
    case.log_q = case.log_p

    loss, gradient, metrics = case.evaluate(name, residual_baseline=baseline)

    for found in (loss, gradient, metrics["kl"]):  # a tail by 1 - mass has lost some digits
        assert_close(found, torch.zeros_like(found), rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", LOSSES)
def test_metrics_are_the_same_whatever_loss_is_minimised(name):
    case = Enumerated(8, 3)

    _, _, expected = case.evaluate("resopd")
    loss, _, found = case.evaluate(name)

    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert torch.equal(found["kl"], loss) == (name == "resopd")
    assert not any(value.requires_grad for value in found.values())


@each_size
def test_metrics_add_up(V, k):
    case = Enumerated(V, k)
    p = case.log_p.exp()

    _, _, metrics = case.evaluate()

    assert (metrics["kl_coarse"] >= -1e-12).all()
    assert (metrics["kl_coarse"] <= case.kl[:, None] + 1e-12).all()
    exactly(metrics["kl"], metrics["kl_coarse"] + metrics["residual"])
    exactly(metrics["residual_abs"], metrics["residual"].abs())
    exactly(metrics["head_hit"], case.hit.double())
    exactly(metrics["student_head_mass"][:, 0], p.gather(1, case.head).sum(1))
    exactly(metrics["teacher_head_mass"][:, 0], case.log_q.exp().gather(1, case.head).sum(1))


@each_size
def test_the_head_event_has_mean_zero_and_the_variance_that_is_told(V, k):
    case = Enumerated(V, k)
    p = case.log_p.exp()

    _, _, metrics = case.evaluate()

    exactly(mean(p, metrics["head_event"]), torch.zeros(SEEDS, dtype=torch.float64))
    exactly(mean(p, metrics["head_event"].square()), metrics["head_event_variance"][:, 0])


def test_head_overlap_is_the_share_of_the_head_that_is_the_students_too():
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0]]).repeat(3, 1)

    overlap = head_overlap(logits, torch.tensor([[0, 1], [1, 2], [3, 4]]))

    assert overlap.tolist() == [1.0, 0.5, 0.0]


@pytest.mark.parametrize("mass", [1e-12, 0.3, 0.5, 0.7, 1 - 1e-9])
def test_the_teachers_tail_is_what_the_head_leaves(mass):
    head = torch.tensor([[mass / 4, 3 * mass / 4]], dtype=torch.float64).log()

    assert_close(tail_logprob(head), torch.tensor([math.log1p(-mass)], dtype=torch.float64), rtol=1e-6, atol=0)


def test_a_teachers_head_of_mass_one_or_more_by_rounding_leaves_a_finite_tail():
    head = torch.tensor([[0.5, 0.5], [0.5, 0.5005]]).log()

    assert (tail_logprob(head) < -15).all()
    assert tail_logprob(head).isfinite().all()
