"""LanguageModel: logits of response tokens, sample by sample."""

import pytest
import torch

from miles_dmd.modalities.language.batch import TokenBatch
from miles_dmd.modalities.language.model import LanguageModel


def batch_of(prompts, responses, width=0):
    rows = [[*p, *r] for p, r in zip(prompts, responses, strict=True)]
    width, response = max(width, *map(len, rows)), max(map(len, responses))
    return TokenBatch(
        ids=tuple(range(len(rows))),
        prompt_ids=tuple(range(len(rows))),
        prompt_lengths=tuple(map(len, prompts)),
        response_lengths=tuple(map(len, responses)),
        tokens=torch.tensor([row + [0] * (width - len(row)) for row in rows]),
        logprobs=torch.zeros(len(rows), response),
        policy_version=0,
        run_seed=0,
    )


PROMPTS, RESPONSES = [[3, 1, 4, 1, 5], [9], [2, 6]], [[5, 3], [5, 8, 9, 7, 9], [3]]


def one_by_one(model, prompts, responses):
    """Rows of each sample's own whole forward."""
    with torch.no_grad():
        return torch.cat(
            [
                model(input_ids=torch.tensor([[*p, *r]])).logits[0, len(p) - 1 : len(p) + len(r) - 1]
                for p, r in zip(prompts, responses, strict=True)
            ]
        )


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_rows_are_those_of_each_samples_own_forward(build, kind):
    model = build(kind)
    batch = batch_of(PROMPTS, RESPONSES, width=12)

    logits = LanguageModel(model).response_logits(batch)

    assert logits.shape == (batch.weight, model.config.vocab_size)
    torch.testing.assert_close(logits, one_by_one(model, PROMPTS, RESPONSES), rtol=1e-5, atol=1e-5)


def test_a_single_sample_has_no_rows_to_leave_out(build):
    model = build()

    logits = LanguageModel(model).response_logits(batch_of(PROMPTS[:1], RESPONSES[:1], width=9))

    torch.testing.assert_close(logits, one_by_one(model, PROMPTS[:1], RESPONSES[:1]), rtol=1e-5, atol=1e-5)


def test_what_stands_in_the_padding_changes_nothing(build):
    model, batch = build(), batch_of(PROMPTS, RESPONSES, width=12)
    ends = torch.tensor(batch.prompt_lengths) + torch.tensor(batch.response_lengths)
    noisy = batch.tokens.where(torch.arange(12) < ends[:, None], 17)

    with torch.no_grad():
        clean = LanguageModel(model).response_logits(batch)
        batch.tokens.copy_(noisy)
        changed = LanguageModel(model).response_logits(batch)

    assert torch.equal(clean, changed)


def test_no_logits_are_made_of_prompts(build):
    model, shapes = build(), []
    model.lm_head.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape[:2])))

    LanguageModel(model).response_logits(batch_of([[1] * 8, [2] * 6], [[3, 3], [4]]))

    assert shapes == [(2, 4)]  # rows 5 .. 8


def test_gradients_reach_the_network(build):
    model = build()

    LanguageModel(model).response_logits(batch_of(PROMPTS, RESPONSES)).logsumexp(-1).sum().backward()

    assert all(value.grad is not None and value.grad.abs().sum() > 0 for value in model.parameters())
