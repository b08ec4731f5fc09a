"""Every sample has one rank and one micro-batch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_dmd.errors import ConfigError, PlanError
from miles_dmd.sampling.partition import micro_batches, rows_of_rank


@given(rows=st.integers(1, 9), world_size=st.integers(1, 9))
def test_ranks_hold_equally_many_rows_in_rank_order(rows, world_size):
    parts = [rows_of_rank(rows * world_size, rank, world_size) for rank in range(world_size)]

    assert [row for part in parts for row in part] == list(range(rows * world_size))
    assert {len(part) for part in parts} == {rows}


@given(num_samples=st.integers(0, 40), size=st.integers(1, 11))
def test_micro_batches_cover_the_rows_in_order_and_only_the_last_is_short(num_samples, size):
    parts = micro_batches(num_samples, size)

    assert [row for part in parts for row in part] == list(range(num_samples))
    assert all(len(part) == size for part in parts[:-1])
    assert all(1 <= len(part) <= size for part in parts)


@pytest.mark.parametrize(("num_samples", "world_size", "nearest"), [(7, 2, 6), (11, 4, 12), (3, 8, 8), (10, 4, 8)])
def test_rows_that_do_not_divide_are_refused_with_the_nearest_that_do(num_samples, world_size, nearest):
    with pytest.raises(ConfigError, match=f"{num_samples} samples do not divide .* {world_size} ranks; {nearest} does"):
        rows_of_rank(num_samples, 0, world_size)


@pytest.mark.parametrize("arguments", [(0, 0, 1), (4, 0, 0), (4, -1, 2), (4, True, 2), (4.0, 0, 2), ("4", 0, 2)])
def test_counts_of_a_partition_are_whole_numbers(arguments):
    with pytest.raises(PlanError, match="must be a whole number"):
        rows_of_rank(*arguments)


def test_a_rank_beyond_the_world_is_refused():
    with pytest.raises(ConfigError, match="rank 2 is none of 2 ranks"):
        rows_of_rank(4, 2, 2)


@pytest.mark.parametrize(("num_samples", "size"), [(4, 0), (-1, 2), (4, True), (4, 2.0)])
def test_counts_of_micro_batches_are_whole_numbers(num_samples, size):
    with pytest.raises(PlanError, match="must be a whole number"):
        micro_batches(num_samples, size)
