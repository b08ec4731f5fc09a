"""The share of a change that a dtype keeps, by the definition; and which dtype is taken for it."""

import math

import numpy as np
import pytest
import torch

from miles_dmd.training.rounding import rounded

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def network(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).mul(0.02).to(dtype)
        for name, shape in (("a", (64, 32)), ("b", (32,)), ("c", (8, 8, 3)))
    }


def trained(start, step):
    generator = torch.Generator().manual_seed(9)
    return {name: value.float() + step * torch.randn(value.shape, generator=generator) for name, value in start.items()}


def by_definition(written, average, start):
    """1 - |written - average| / |average - start|, of one long vector in float64."""
    one = {
        what: np.concatenate([tensors[name].double().numpy().ravel() for name in sorted(average)])
        for what, tensors in (("written", written), ("average", average), ("start", start))
    }
    error = np.linalg.norm(one["written"] - one["average"])
    return max(0.0, 1 - error / np.linalg.norm(one["average"] - one["start"]))


@pytest.mark.parametrize("asked", ["stored", "bf16", "fp32", "auto"])
@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("step", [1e-6, 1e-4, 1e-2, 1.0])
def test_the_share_is_that_of_the_definition(step, stored, asked):
    start = network(DTYPES[stored])
    average = trained(start, step)

    written, report = rounded(dict(average), start, asked)

    assert report.change_kept == pytest.approx(by_definition(written, average, start), abs=1e-6)
    in_stored = {name: value.to(DTYPES[stored]) for name, value in average.items()}
    assert report.stored_change_kept == pytest.approx(by_definition(in_stored, average, start), abs=1e-6)
    assert {value.dtype for value in written.values()} == {DTYPES[report.dtype]}
    assert report.stored_dtype == stored
    if asked in DTYPES:
        assert report.dtype == asked
    elif asked == "stored":
        assert report.dtype == stored
    else:
        assert report.dtype == (stored if report.stored_change_kept >= 0.99 else "fp32")
    for name, value in written.items():
        assert torch.equal(value, average[name].to(value.dtype))


@pytest.mark.parametrize(("step", "dtype"), [(1e-5, "fp32"), (1.0, "bf16")])
def test_auto_takes_half_the_bytes_only_where_they_hold_the_change(step, dtype):
    start = network(torch.bfloat16)

    _, report = rounded(trained(start, step), start, "auto")

    assert report.dtype == dtype
    assert report.change_kept >= 0.99


def test_tensors_keep_a_dtype_each():
    start = network(torch.bfloat16) | {"b": network(torch.float32)["b"]}

    written, report = rounded(trained(start, 1.0), start, "auto")

    assert (report.dtype, written["a"].dtype, written["b"].dtype) == ("bf16+fp32", torch.bfloat16, torch.float32)


def test_what_did_not_change_is_kept():
    start = network(torch.bfloat16)

    _, report = rounded({name: value.float() for name, value in start.items()}, start, "auto")

    assert (report.dtype, report.change_kept) == ("bf16", 1.0)


def test_rounding_a_student_that_did_not_change_keeps_nothing_of_it():
    start = network(torch.float32)

    _, report = rounded(dict(start), start, "bf16")

    assert (report.change_kept, report.stored_change_kept) == (0.0, 1.0)


@pytest.mark.parametrize("asked", ["auto", "stored"])
@pytest.mark.parametrize("narrow", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_8_bits_are_never_written(narrow, asked):
    start = {name: value.to(narrow) for name, value in network(torch.float32).items()}

    written, report = rounded(trained(start, 1e-4), start, asked)

    assert {value.dtype for value in written.values()} == {torch.float32}
    assert (report.dtype, report.change_kept) == ("fp32", 1.0)
    assert report.stored_change_kept < 0.1


def test_a_weight_that_overflows_keeps_nothing():
    start = network(torch.float16)
    average = trained(start, 1e-2) | {"b": torch.full((32,), 1e6)}

    _, report = rounded(average, start, "auto")

    assert (report.dtype, report.change_kept, report.stored_change_kept) == ("fp32", 1.0, 0.0)
    assert math.isfinite(report.change_kept)
