"""Sampling of responses: exact distribution, exact log-probs, one generator a sample, end tokens."""

import pytest
import torch

from miles_dmd.modalities.language.batch import TokenBatch
from miles_dmd.modalities.language.model import LanguageModel
from miles_dmd.modalities.language.sampler import inverse_cdf, sample

PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6], [5, 3, 5, 8]]
CPU = torch.device("cpu")


def drawn(model, prompts=PROMPTS, *, seeds=None, max_new_tokens=12, end_ids=()):
    seeds = list(range(len(prompts))) if seeds is None else seeds
    return sample(model, prompts, seeds=seeds, max_new_tokens=max_new_tokens, end_ids=end_ids, device=CPU)


def batch_of(prompts, responses):
    rows = [[*p, *t[:n].tolist()] for p, t, n in zip(prompts, responses.tokens, responses.lengths, strict=True)]
    width = max(map(len, rows))
    return TokenBatch(
        ids=tuple(range(len(rows))),
        prompt_ids=tuple(range(len(rows))),
        prompt_lengths=tuple(map(len, prompts)),
        response_lengths=responses.lengths,
        tokens=torch.tensor([row + [0] * (width - len(row)) for row in rows]),
        logprobs=responses.logprobs,
        policy_version=0,
        run_seed=0,
    )


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_logprobs_are_those_of_a_whole_forward_whatever_the_prompts_lengths(build, kind):
    model = build(kind)

    responses = drawn(model, end_ids=[7])

    batch = batch_of(PROMPTS, responses)
    with torch.no_grad():
        whole = LanguageModel(model).response_logits(batch).log_softmax(-1)
    expected = whole.gather(1, batch.observed[batch.mask][:, None])[:, 0]
    torch.testing.assert_close(responses.logprobs[batch.mask], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [1, 3])
def test_samples_are_the_same_in_batches_of_any_size(build, size):
    model = build()
    whole = drawn(model, end_ids=[7])

    for start in range(0, len(PROMPTS), size):
        rows = range(start, min(start + size, len(PROMPTS)))
        part = drawn(model, [PROMPTS[row] for row in rows], seeds=list(rows), end_ids=[7])

        assert part.lengths == whole.lengths[rows.start : rows.stop]
        for row, tokens in zip(rows, part.tokens, strict=True):
            assert tokens[: whole.lengths[row]].tolist() == whole.tokens[row, : whole.lengths[row]].tolist()


def test_samples_are_of_their_seeds_alone(build):
    model = build()

    here, there = drawn(model, [[1, 2]] * 3, seeds=[5, 6, 5]), drawn(model, [[1, 2]], seeds=[6])

    assert here.tokens[0].tolist() == here.tokens[2].tolist() != here.tokens[1].tolist()
    assert here.tokens[1].tolist() == there.tokens[0].tolist()


def test_first_tokens_follow_the_softmax(build):
    model, count = build(), 4000
    with torch.no_grad():
        probabilities = model(input_ids=torch.tensor([[3, 1, 4]])).logits[0, -1].double().softmax(-1)

    tokens = drawn(model, [[3, 1, 4]] * count, max_new_tokens=1).tokens[:, 0]

    seen = torch.bincount(tokens, minlength=len(probabilities))
    often = probabilities * count > 5
    chi_square = ((seen - count * probabilities) ** 2 / (count * probabilities))[often].sum()
    freedom = int(often.sum()) - 1
    assert freedom > 5
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5


def test_a_response_ends_with_its_first_end_token(build):
    responses = drawn(build(), [[1, 2]] * 40, end_ids=[7, 11], max_new_tokens=10)

    assert {1, 10} < set(responses.lengths)
    for length, tokens, logprobs in zip(*responses, strict=True):
        ends = [place for place, token in enumerate(tokens.tolist()[:length]) if token in (7, 11)]
        assert ends == [length - 1] or (not ends and length == 10)
        assert tokens[length:].tolist() == logprobs[length:].tolist() == [0] * (tokens.shape[0] - length)


def test_padding_is_no_wider_than_the_longest_response(build):
    responses = drawn(build(), [[1, 2]] * 2, end_ids=range(23), max_new_tokens=10)

    assert responses.lengths == (1, 1)
    assert responses.tokens.shape == responses.logprobs.shape == (2, 1)


def test_settings_of_the_models_own_generation_file_are_not_followed(build):
    model = build()
    plain = drawn(model)
    model.generation_config.update(
        temperature=0.1, top_k=1, top_p=0.1, repetition_penalty=3.0, do_sample=True, max_length=3, eos_token_id=5,
        suppress_tokens=[1, 2, 3], min_new_tokens=4,
    )  # fmt: skip

    assert torch.equal(drawn(model).tokens, plain.tokens)
    assert model.generation_config.repetition_penalty == 3.0


def test_every_number_falls_into_its_tokens_interval():
    logprobs = torch.tensor([[0.5, 0.0, 0.25, 0.25, 0.0]], dtype=torch.float64).log().expand(6, 5)
    uniform = torch.tensor([0.0, 0.4999, 0.5, 0.7499, 0.75, 1 - 2**-53], dtype=torch.float64)

    assert inverse_cdf(logprobs, uniform).tolist() == [0, 0, 2, 2, 3, 3]


def test_tokens_of_tiny_probability_are_reached():
    """1e-9 of a token at the end of 150,000: an fp32 sum would have passed 1 before."""
    logits = torch.zeros(1, 150_000, dtype=torch.float64)
    logits[0, -1] = -9.0
    logprobs = logits.log_softmax(-1)

    edge = 1 - logprobs[0, -1].exp()

    assert inverse_cdf(logprobs, edge[None] + 1e-12).tolist() == [149_999]
    assert inverse_cdf(logprobs, edge[None] - 1e-12).tolist() == [149_998]
