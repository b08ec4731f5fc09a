"""TokenBatch: rows, padding, alignment of responses."""

import dataclasses

import pytest
import torch

from miles_dmd.modalities.language.batch import TokenBatch


def batch(prompts, responses, first_id=0, **more):
    rows = [list(p) + list(r) for p, r in zip(prompts, responses, strict=True)]
    longest, response = max(map(len, rows)), max(map(len, responses))
    return TokenBatch(
        ids=tuple(range(first_id, first_id + len(rows))),
        prompt_ids=tuple(range(10, 10 + len(rows))),
        prompt_lengths=tuple(map(len, prompts)),
        response_lengths=tuple(map(len, responses)),
        tokens=torch.tensor([row + [0] * (longest - len(row)) for row in rows]),
        logprobs=torch.tensor([[-float(t) for t in r] + [0.0] * (response - len(r)) for r in responses]),
        policy_version=more.get("policy_version", 3),
        run_seed=7,
    )


@pytest.fixture
def uneven():
    return batch([[1, 2, 3], [4]], [[5], [6, 7]])


def test_observed_tokens_and_mask_follow_each_samples_own_lengths(uneven):
    assert uneven.observed.tolist() == [[5, 0], [6, 7]]
    assert uneven.mask.tolist() == [[True, False], [True, True]]
    assert uneven.weight == 3.0


def test_a_response_that_ends_with_the_row_is_read_to_its_end():
    whole = batch([[1, 2, 3, 4, 5], [1]], [[6], [7, 8]])

    assert whole.observed.tolist() == [[6, 0], [7, 8]]


def test_rows_are_taken_in_order_and_keep_the_padding(uneven):
    taken = uneven.take([1])

    assert (taken.ids, taken.prompt_ids, taken.prompt_lengths, taken.response_lengths) == ((1,), (11,), (1,), (2,))
    assert taken.tokens.shape == (1, uneven.tokens.shape[1])
    assert taken.observed.tolist() == [[6, 7]]


def test_batches_of_different_widths_are_joined_under_the_longest(uneven):
    long = batch([[1, 2, 3, 4]], [[5, 6, 7]], first_id=5)

    joined = TokenBatch.join([uneven, long])

    assert joined.ids == (0, 1, 5)
    assert joined.tokens.shape == (3, 7)
    assert joined.observed.tolist() == [[5, 0, 0], [6, 7, 0], [5, 6, 7]]
    assert joined.logprobs[0].tolist() == [-5.0, 0.0, 0.0]


def test_split_and_joined_is_the_same(uneven):
    joined = TokenBatch.join([uneven.take([0]), uneven.take([1])])

    for field in dataclasses.fields(TokenBatch):
        one, other = getattr(joined, field.name), getattr(uneven, field.name)
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_batches_of_two_policies_are_not_joined(uneven):
    with pytest.raises(ValueError, match="policy versions"):
        TokenBatch.join([uneven, batch([[1]], [[2]], policy_version=4)])
