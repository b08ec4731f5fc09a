"""The bucket kernel: closed-form backward, fp32 where tails are tiny, memory of one chunk."""

import argparse
import runpy
import statistics
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from miles_dmd.equations.buckets import bucket_logprobs
from miles_dmd.equations.tokens import resopd_loss

BENCHMARK = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "resopd_kernel.py"))


def random_rows(N=7, V=11, k=3, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(N, V, generator=generator, dtype=torch.float64)).to(dtype)
    head = torch.rand(N, V, generator=generator).topk(k).indices
    return logits.requires_grad_(), head, torch.randint(V, (N,), generator=generator)


def dense(logits, head, observed):
    logp = logits.log_softmax(1)
    tail = logp.scatter(1, head, -torch.inf).logsumexp(1)
    return logp.gather(1, head), tail, logp.gather(1, observed[:, None])[:, 0]


def gradient(logits, numbers, seed=1):
    generator = torch.Generator().manual_seed(seed)
    total = sum((torch.randn(n.shape, generator=generator, dtype=torch.float64).to(n) * n).sum() for n in numbers)
    return torch.autograd.grad(total, logits)[0]


# --- values and gradient


@pytest.mark.parametrize("k", [1, 3, 10])
def test_numbers_and_gradient_are_those_of_a_dense_log_softmax(k):
    rows = random_rows(k=k)

    found, expected = bucket_logprobs(*rows), dense(*rows)

    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, rtol=1e-13, atol=1e-13)
    assert_close(gradient(rows[0], found), gradient(rows[0], expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("k", [1, 4])
def test_gradcheck(k):
    logits, head, observed = random_rows(N=4, V=6, k=k)

    assert torch.autograd.gradcheck(lambda x: bucket_logprobs(x, head, observed, chunk_rows=3), (logits,))


def test_without_a_tail_the_head_is_the_whole_distribution():
    logits, head, observed = random_rows(V=5, k=5)

    head_logp, tail, observed_logp = bucket_logprobs(logits, head, observed)
    found = gradient(logits, (head_logp, observed_logp))

    assert (tail == -torch.inf).all()
    assert_close(head_logp.exp().sum(1), torch.ones(7, dtype=torch.float64))
    assert_close(found, gradient(logits, dense(logits, head, observed)[::2]))


def test_rows_do_not_know_of_each_other():
    logits, head, observed = random_rows()

    bucket_logprobs(logits, head, observed).tail[3].backward()

    assert logits.grad[3].abs().max() > 0
    assert logits.grad[[0, 1, 2, 4, 5, 6]].abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("chunk_rows", [1, 2, 3, 7, 100])
def test_chunk_size_changes_nothing(dtype, chunk_rows):
    rows = random_rows(V=1000, dtype=dtype)

    whole, parts = bucket_logprobs(*rows), bucket_logprobs(*rows, chunk_rows=chunk_rows)

    assert all(torch.equal(one, other) for one, other in zip(whole, parts, strict=True))
    assert torch.equal(gradient(rows[0], whole), gradient(rows[0], parts))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_logits_are_computed_in_fp32_and_their_gradient_is_rounded_once(dtype):
    logits, head, observed = random_rows(V=1000, dtype=dtype)
    single = logits.detach().float().requires_grad_()

    halves, singles = bucket_logprobs(logits, head, observed), bucket_logprobs(single, head, observed)

    assert all(number.dtype == torch.float32 for number in halves)
    assert all(torch.equal(half, one) for half, one in zip(halves, singles, strict=True))
    assert torch.equal(gradient(logits, halves), gradient(single, singles).to(dtype))


def test_ids_may_be_of_any_integer_type():
    logits, head, observed = random_rows()

    narrow, wide = bucket_logprobs(logits, head.int(), observed.short()), bucket_logprobs(logits, head, observed)

    assert all(torch.equal(one, other) for one, other in zip(narrow, wide, strict=True))


def test_the_gradient_can_be_written_over_logits_that_nobody_else_needs():
    logits, head, observed = random_rows()
    expected = gradient(logits, bucket_logprobs(logits, head, observed))
    made = logits * 1.0

    found = gradient(made, bucket_logprobs(made, head, observed, reuse_logits=True))

    assert torch.equal(found, expected)
    assert found.data_ptr() == made.data_ptr()


def test_logits_that_something_else_needs_are_not_spent_in_silence():
    logits, head, observed = random_rows()
    made = logits.exp()  # whose backward reads its result

    tail = bucket_logprobs(made, head, observed, reuse_logits=True).tail

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        tail.sum().backward()


# --- fp32


@pytest.mark.parametrize("mass", [1e-1, 1e-4, 1e-8, 1e-14])
def test_a_tail_of_any_mass_keeps_its_digits_in_fp32(mass):
    logits, head, _, observed, _ = BENCHMARK["rows_of_tail_mass"](mass, 0)

    single, exact = bucket_logprobs(logits.float(), head, observed), bucket_logprobs(logits, head, observed)

    assert exact.tail.exp().item() == pytest.approx(mass, rel=1e-3)
    assert_close(single.tail.double(), exact.tail, rtol=0, atol=1e-5)
    assert_close(single.observed.double(), exact.observed, rtol=0, atol=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_masses_that_round_to_one_keep_tail_and_gradient(seed):
    logits, head, head_logprobs, observed, observed_logprob = BENCHMARK["rows_of_tail_mass"](5e-9, seed)
    inputs = [v.float() if v.is_floating_point() else v for v in (logits, head, head_logprobs, observed)]

    mass = inputs[0].softmax(1)[:, :4].sum()
    found = BENCHMARK["gradient"](BENCHMARK["kernel"], (*inputs, observed_logprob.float()))
    expected = BENCHMARK["gradient"](BENCHMARK["kernel"], (logits, head, head_logprobs, observed, observed_logprob))

    assert mass > 1 - 1e-6
    assert ((found - expected).norm() / expected.norm()) < 1e-3


def test_error_of_tail_hits_at_a_tail_mass_of_1e_4_is_small_where_that_of_the_dense_formula_is_not():
    ours, theirs = [], []
    for seed in range(10):
        exact = BENCHMARK["rows_of_tail_mass"](1e-4, seed)
        single = tuple(value.float() if value.is_floating_point() else value for value in exact)
        for found, name in ((ours, "kernel"), (theirs, "dense_resopd")):
            expected = BENCHMARK["gradient"](BENCHMARK[name], exact)
            error = (BENCHMARK["gradient"](BENCHMARK[name], single) - expected).norm() / expected.norm()
            found.append(error.item())

    assert statistics.median(ours) <= 1e-3
    assert max(ours) <= 5e-3
    assert statistics.median(theirs) > 0.05


@pytest.mark.parametrize("seed", range(4))
def test_the_dense_formula_of_the_published_form_gives_the_same_gradient_in_fp64(seed):
    logits, head, observed = random_rows(N=40, V=9, k=3, seed=seed)
    teacher = random_rows(N=40, V=9, seed=seed + 100)[0].detach().log_softmax(1)
    inputs = (logits, head, teacher.gather(1, head), observed, teacher.gather(1, observed[:, None])[:, 0])

    found = BENCHMARK["gradient"](lambda *x: resopd_loss(*x)[0], inputs)

    assert_close(found, BENCHMARK["gradient"](BENCHMARK["dense_resopd"], inputs), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("offset", [-1000.0, 1000.0])
def test_an_offset_common_to_all_logits_costs_no_digits(offset):
    logits, head, observed = random_rows(V=1000, dtype=torch.float32)
    moved = (logits.detach() * 64).round() / 64  # exact beside the offset
    found, expected = bucket_logprobs(moved + offset, head, observed), bucket_logprobs(moved, head, observed)

    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_logit_that_is_not_finite_is_not_hidden(bad):
    logits, head, observed = random_rows()
    logits = logits.detach()
    logits[2, 5] = bad

    tail = bucket_logprobs(logits, head, observed).tail

    assert not tail[2].isfinite()
    assert tail[[0, 1, 3]].isfinite().all()


# --- memory


@pytest.mark.parametrize(("dtype", "gradients"), [("bfloat16", 1 / 2), ("float32", 1)])
def test_memory_beyond_the_logits_is_their_gradient_and_a_chunk(dtype, gradients):
    rows, vocabulary = 64, 20_000
    chosen = argparse.Namespace(rows=rows, vocabulary=vocabulary, top_k=4, dtype=dtype, device="cpu")

    dense, kernel, over_logits = (BENCHMARK["peak_bytes"](loss, chosen) for loss in BENCHMARK["VARIANTS"].values())

    unit, chunk = 4 * rows * vocabulary, 4 * 2**18
    assert dense > 2.9 * unit
    assert kernel < gradients * unit + 2.1 * chunk  # one, and one that torch makes to round it
    assert over_logits < 2.1 * chunk


# --- refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, h, o: (x[0], h, o), r"logits must be \[N, V\] and floating, got \(11,\)"),
        (lambda x, h, o: (x.long(), h, o), "floating, got .* torch.int64"),
        (lambda x, h, o: (x, h[:5], o), r"head_ids must be \[7, K\]"),
        (lambda x, h, o: (x, h[:, :0], o), "1 <= K <= 11"),
        (lambda x, h, o: (x, h.repeat(1, 4), o), "1 <= K <= 11"),
        (lambda x, h, o: (x, h, o[:, None]), r"observed_ids must be \[7\]"),
        (lambda x, h, o: (x, h.float(), o), "head_ids must be integers, got torch.float32"),
        (lambda x, h, o: (x, h, o.bool()), "observed_ids must be integers, got torch.bool"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(change, message):
    logits, head, observed = random_rows()

    with pytest.raises(ValueError, match=message):
        bucket_logprobs(*change(logits.detach(), head, observed))


def test_a_chunk_without_rows_is_refused():
    with pytest.raises(ValueError, match="chunk_rows must be at least 1, got 0"):
        bucket_logprobs(*random_rows(), chunk_rows=0)
