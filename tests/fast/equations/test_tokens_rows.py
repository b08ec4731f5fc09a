"""Rows of the token losses: masks, padding, slices of a sequence, gradients of the teacher's tensors, refusals."""

import pytest
import torch
from torch.testing import assert_close

from miles_dmd.equations.tokens import LOSSES, resopd, resopd_loss, token_loss

NAN, INF = float("nan"), float("inf")
N, V, K = 6, 13, 3
VALID = torch.tensor([True, False, True, True, False, True])
each_loss = pytest.mark.parametrize("name", LOSSES)


def rows(n=N, dtype=torch.float64, seed=0):
    """Arguments of token_loss by name."""
    generator = torch.Generator().manual_seed(seed)
    logits, other = 2 * torch.randn(2, n, V, generator=generator, dtype=torch.float64)
    teacher = other.log_softmax(1)
    observed = torch.randint(V, (n,), generator=generator)
    head = teacher.topk(K).indices
    return {
        "student_logits": logits.to(dtype).requires_grad_(),
        "head_ids": head,
        "head_logprobs": teacher.gather(1, head).to(dtype),
        "observed_ids": observed,
        "observed_logprobs": teacher.gather(1, observed[:, None])[:, 0].to(dtype),
        "teacher_tail_logprob": teacher.scatter(1, head, -INF).logsumexp(1).to(dtype),
        "importance_weight": (0.5 + torch.rand(n, generator=generator)).to(dtype),
    }


def evaluate(name, arguments, **more):
    loss, metrics = token_loss(name, **arguments, **more)
    (gradient,) = torch.autograd.grad(loss.sum(), arguments["student_logits"])
    return loss.detach(), gradient, metrics


# --- masked rows


@each_loss
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("tail", [True, False], ids=["tail told", "tail from the head"])
def test_masked_rows_are_exact_zeros_whatever_they_hold(name, bad, tail):
    arguments = rows() if tail else {**rows(), "teacher_tail_logprob": None}
    expected = [part[VALID] for part in evaluate(name, arguments)[:2]]
    broken = {key: value.detach().clone() for key, value in arguments.items() if value is not None}
    for key, value in broken.items():
        value[~VALID] = -7 if key.endswith("ids") else bad
    broken["student_logits"].requires_grad_()

    loss, gradient, metrics = evaluate(name, {**arguments, **broken}, mask=VALID)

    for found in (loss, gradient, *metrics.values()):
        assert found[~VALID].abs().max() == 0
        assert found[VALID].isfinite().all()
    assert torch.equal(loss[VALID], expected[0])
    assert torch.equal(gradient[VALID], expected[1])


@each_loss
def test_a_mask_of_zeros_and_ones_is_a_mask_of_bools(name):
    bools, ints = evaluate(name, rows(), mask=VALID), evaluate(name, rows(), mask=VALID.long())

    assert torch.equal(bools[0], ints[0])
    assert torch.equal(bools[1], ints[1])


@each_loss
def test_all_rows_may_be_masked(name):
    loss, gradient, _ = evaluate(name, rows(), mask=torch.zeros(N, dtype=torch.bool))

    assert loss.abs().max() == gradient.abs().max() == 0


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_valid_row_that_is_not_finite_is_not_hidden(bad):
    arguments = rows()
    arguments["head_logprobs"][2, 1] = bad

    assert not evaluate("resopd", arguments)[0][2].isfinite()


def test_the_teachers_score_of_a_token_in_the_head_is_not_used_at_all():
    arguments = rows()
    arguments["observed_ids"] = arguments["head_ids"][:, 1]
    expected = evaluate("resopd", arguments)
    arguments["observed_logprobs"] = torch.full((N,), NAN, dtype=torch.float64)

    loss, gradient, _ = evaluate("resopd", arguments)

    assert torch.equal(loss, expected[0])
    assert torch.equal(gradient, expected[1])


# --- slices


@each_loss
def test_two_uneven_sequence_slices_with_padding_give_the_wholes_gradient(name):
    """As ranks of a sequence-parallel group cut it: 2 sequences of 7 tokens, padded to 8, cut after 5."""
    whole = rows(14)
    loss, gradient, _ = evaluate(name, whole)

    padded = {key: torch.cat([v.detach().reshape(2, 7, *v.shape[1:]), v.detach().new_zeros(2, 1, *v.shape[1:])], 1)
              for key, v in whole.items()}  # fmt: skip
    valid = torch.arange(8).expand(2, 8) < 7
    found_loss, found_gradient = [], []
    for part in (slice(0, 5), slice(5, 8)):
        cut = {key: value[:, part].flatten(0, 1) for key, value in padded.items()}
        cut["student_logits"].requires_grad_()
        one_loss, one_gradient, _ = evaluate(name, cut, mask=valid[:, part].flatten())
        found_loss.append(one_loss.reshape(2, -1))
        found_gradient.append(one_gradient.reshape(2, -1, V))

    assert torch.equal(torch.cat(found_loss, 1)[:, :7].flatten(), loss)
    assert torch.equal(torch.cat(found_gradient, 1)[:, :7].flatten(0, 1), gradient)
    assert torch.cat(found_gradient, 1)[:, 7].abs().max() == 0


@each_loss
@pytest.mark.parametrize("chunk_rows", [1, 4, 100])
@pytest.mark.parametrize("reuse_logits", [False, True])
def test_chunks_and_spent_logits_change_nothing(name, chunk_rows, reuse_logits):
    expected = evaluate(name, rows())

    found = evaluate(name, rows(), chunk_rows=chunk_rows, reuse_logits=reuse_logits)

    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


# --- types and gradients


@each_loss
def test_no_gradient_reaches_the_teachers_tensors(name):
    arguments = rows()
    for key in ("head_logprobs", "observed_logprobs", "teacher_tail_logprob", "importance_weight"):
        arguments[key].requires_grad_()

    loss, metrics = token_loss(name, **arguments)
    loss.sum().backward()

    assert arguments["student_logits"].grad.abs().max() > 0
    assert all(value.grad is None for key, value in arguments.items() if key != "student_logits")
    assert not any(value.requires_grad for value in metrics.values())


@each_loss
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_losses_are_fp32_or_fp64_and_gradients_of_the_logits_type(name, dtype):
    loss, gradient, metrics = evaluate(name, rows(dtype=dtype))

    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert loss.dtype == expected
    assert {value.dtype for value in metrics.values()} == {expected}
    assert gradient.dtype == dtype


@each_loss
def test_fp32_is_near_fp64(name):
    (loss, gradient, _), (exact, slope, _) = (evaluate(name, rows(dtype=d)) for d in (torch.float32, torch.float64))

    assert_close(loss.double(), exact, rtol=1e-4, atol=1e-5)
    assert_close(gradient.double(), slope, rtol=1e-4, atol=1e-5)


def test_positional_arguments_are_those_of_the_public_signature():
    arguments = rows()
    order = ["student_logits", "head_ids", "head_logprobs", "observed_ids", "observed_logprobs"]

    found, _ = resopd_loss(
        *(arguments[key] for key in order), VALID, arguments["teacher_tail_logprob"], "bucket",
        arguments["importance_weight"],
    )  # fmt: skip

    assert torch.equal(found, token_loss("resopd", **arguments, mask=VALID, residual_baseline="bucket")[0])


def test_tails_below_the_floor_are_alike():
    """Both tiny: no log-ratio of two numbers that are noise."""
    arguments = rows()
    with torch.no_grad():
        arguments["student_logits"].scatter_add_(
            1, arguments["head_ids"], torch.full((N, K), 30.0, dtype=torch.float64)
        )
    arguments["teacher_tail_logprob"] = torch.full((N,), -17.0, dtype=torch.float64)

    _, _, metrics = evaluate("resopd", arguments)

    assert metrics["tail_log_ratio"].abs().max() == 0


# --- refusals


def test_an_unknown_loss_lists_those_there_are():
    with pytest.raises(
        ValueError, match="unknown token loss 'k1': must be one of resopd, forward_kl_topk_tail, sampled_k2"
    ):
        token_loss("k1", **rows())


def test_an_unknown_baseline_lists_those_there_are():
    with pytest.raises(ValueError, match="residual_baseline must be one of none, bucket, got 'mean'"):
        token_loss("resopd", **rows(), residual_baseline="mean")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("head_logprobs", torch.zeros(N, K + 1), "shapes differ: head_logprobs"),
        ("observed_logprobs", torch.zeros(N, 1), r"observed_logprobs must be \[6\]"),
        ("mask", torch.ones(N, 1), r"mask must be \[6\], got \[6, 1\]"),
        ("teacher_tail_logprob", torch.zeros(N - 1), "teacher_tail_logprob must be"),
        ("importance_weight", torch.zeros(N, 1), "importance_weight must be"),
        ("observed_ids", torch.zeros(N + 1, dtype=torch.long), "observed_ids must be"),
        ("head_ids", torch.zeros(N, dtype=torch.long), "head_ids"),
        ("student_logits", torch.zeros(N), "logits must be"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(key, value, message):
    with pytest.raises(ValueError, match=message):
        token_loss("resopd", **{**rows(), key: value})


def test_buckets_alone_are_enough_for_a_loss():
    """The trainer takes weights and drift of the numbers before the loss: one pass over the logits serves both."""
    from miles_dmd.equations.buckets import Buckets, bucket_logprobs

    arguments = rows()
    student = bucket_logprobs(arguments["student_logits"], arguments["head_ids"], arguments["observed_ids"])
    teacher = Buckets(*(arguments[key] for key in ("head_logprobs", "teacher_tail_logprob", "observed_logprobs")))
    hit = (arguments["head_ids"] == arguments["observed_ids"][:, None]).any(1)

    loss = resopd(student, teacher, hit, importance_weight=arguments["importance_weight"])

    assert torch.equal(loss, token_loss("resopd", **arguments)[0])
