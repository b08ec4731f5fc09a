"""Teacher scores at the student's door: sound ones are gathered, others refused with field, place, value and cure."""

import re

import pytest
import torch
from token_batches import batch_of, told_of

from miles_dmd.contracts.external import ExternalData
from miles_dmd.errors import ExternalDataError, ScoresError
from miles_dmd.losses.resopd.payload import teacher_scores_of

V, K = 11, 3
BATCH = batch_of([[1, 2], [3], [4, 5, 6]], [[7, 8, 9], [10], [1, 2]], first=40)


def logits(seed=0):
    return 3 * torch.randn(int(BATCH.weight), V, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def told():
    return told_of(BATCH, logits(), K)


def scores(told, batch=BATCH):
    return teacher_scores_of(batch, told, top_k=K, vocabulary=V)


def test_rows_of_valid_tokens_are_gathered_sample_by_sample(told):
    found = scores(told)

    logq = logits().double().log_softmax(-1)
    torch.testing.assert_close(found.head_logprobs.double(), logq.gather(1, found.head_ids), rtol=0, atol=1e-6)
    torch.testing.assert_close(found.observed_logprobs.double(), logq[range(6), [7, 8, 9, 10, 1, 2]], rtol=0, atol=1e-6)
    assert found.observed_ids.tolist() == [7, 8, 9, 10, 1, 2]
    mass = found.head_logprobs.exp().sum(1) + found.tail_logprobs.exp()
    torch.testing.assert_close(mass, torch.ones(6))


def test_any_rows_of_the_batch_go_with_the_same_rows_of_the_scores(told):
    rows = [2, 0]

    part = scores({name: value[rows] for name, value in told.items()}, BATCH.take(rows))

    whole = scores(told)
    torch.testing.assert_close(part.head_logprobs, whole.head_logprobs[[4, 5, 0, 1, 2]])
    assert part.observed_ids.tolist() == [1, 2, 7, 8, 9]


def test_a_head_of_the_whole_vocabulary_has_no_tail():
    found = teacher_scores_of(BATCH, told_of(BATCH, logits(), V), top_k=V, vocabulary=V)

    assert found.tail_logprobs.tolist() == [-torch.inf] * 6


def put(name, place, value):
    def change(told):
        told[name][place] = value

    return change


def miss_hit(told):
    told["head_ids"][0, 1, 0] = 8
    told["head_ids"][0, 1, 1:] = torch.tensor([0, 1])
    told["observed_logprobs"][0, 1] = told["head_logprobs"][0, 1, 0] - 0.01


def above_the_head(told):
    told["head_ids"][0, 1] = torch.tensor([0, 1, 2])
    told["observed_logprobs"][0, 1] = told["head_logprobs"][0, 1].min() + 0.01


def replaced(name, make):
    return lambda told: told.update({name: make(told[name])})


WRONG = {
    "P1 missing": (lambda told: told.pop("tail_logprobs"), ["40, 41, 42", "lack tail_logprobs", "ask the teacher"]),
    "P1 extra axis": (
        replaced("observed_logprobs", lambda value: value[..., None]),
        ["observed_logprobs has shape [3, 3, 1] and must have [3, 3]"],
    ),
    "P1 another K": (
        replaced("head_ids", lambda value: value[..., :2]),
        ["head_ids has shape [3, 3, 2] and must have [3, 3, 3]", "--opd-top-k"],
    ),
    "P1 another length": (
        replaced("head_logprobs", lambda value: value[:, :2]),
        ["head_logprobs has shape [3, 2, 3] and must have [3, 3, 3]"],
    ),
    "P3 coarse": (replaced("head_logprobs", torch.Tensor.bfloat16), ["head_logprobs has dtype bfloat16", "float32"]),
    "P3 ids": (replaced("head_ids", torch.Tensor.float), ["head_ids has dtype float32 and must have int32 or int64"]),
    "P4 NaN": (put("observed_logprobs", (1, 0), torch.nan), ["sample 41, response position 0", "is nan", "broken"]),
    "P4 inf": (
        put("head_logprobs", (0, slice(1, 3), 1), -torch.inf),
        ["sample 40, response position 1", "head_logprobs is -inf", "(the first of 2)"],
    ),
    "P4 tail": (put("tail_logprobs", (2, 1), torch.inf), ["sample 42, response position 1", "tail_logprobs is inf"]),
    "P5": (
        put("observed_logprobs", (2, 1), 0.5),
        ["sample 42, response position 1", "observed_logprobs is 0.5", "not"],
    ),
    "P6": (put("head_logprobs", (1, 0), -0.1), ["sample 41, response position 0", "add up to 2.71", "normalised"]),
    "P7 negative": (
        put("head_ids", (0, 2, 1), -1),
        ["sample 40, response position 2", "head id -1", "vocabulary of 11"],
    ),
    "P7 beyond": (put("head_ids", (0, 2, 1), V), ["head id 11", "one tokenizer"]),
    "P8": (put("head_ids", (1, 0), 4), ["sample 41, response position 0", "[4, 4, 4] name a token twice", "distinct"]),
    "P9": (
        lambda told: told.update(observed_ids=BATCH.observed.roll(1, 1)),
        ["sample 40, response position 0", "observed_ids has 9 where the student sampled 7", "shifted by one?"],
    ),
    "P10": (miss_hit, ["sample 40, response position 1", "the sampled token 8", "in the head", "shifted by one?"]),
    "P11": (above_the_head, ["sample 40, response position 1", "the sampled token 8 is not in the head", "top-k"]),
}


@pytest.mark.parametrize(("change", "parts"), WRONG.values(), ids=WRONG)
def test_scores_that_cannot_be_the_teachers_are_refused(told, change, parts):
    change(told)

    with pytest.raises(ScoresError) as refused:
        scores(told)

    message = str(refused.value)
    assert all(part in message for part in parts), message
    assert "\n" not in message
    assert isinstance(refused.value, ValueError)


def test_p2_scores_of_other_samples_or_another_policy_are_refused(told):
    data = ExternalData("teacher", BATCH.ids, 0, told)

    with pytest.raises(ExternalDataError, match=re.escape("'teacher' did not score samples [39]")):
        data.require(tuple(told), (39,), 0)
    with pytest.raises(ExternalDataError, match="policy version 0; the batch is of version 1"):
        data.require(tuple(told), BATCH.ids, 1)


def test_p12_a_prompt_of_no_tokens_is_refused(told):
    with pytest.raises(ScoresError, match="sample 41 has a prompt of no tokens, so that no logits predict"):
        scores(told, batch_of([[1, 2], [], [4, 5, 6]], [[7, 8, 9], [10], [1, 2]], first=40))


def test_an_actor_that_got_no_scores_is_told_so():
    with pytest.raises(ScoresError, match="got no teacher scores of samples 40, 41, 42"):
        scores(None)


def test_token_ids_that_a_teacher_ships_are_compared_and_may_be_left_out(told):
    found = scores({**told, "observed_ids": BATCH.observed})

    torch.testing.assert_close(found.observed_ids, scores(told).observed_ids)


@pytest.mark.parametrize("seed", range(5))
def test_a_teacher_shifted_by_one_is_caught(seed):
    """Scores of row P + t beside response token t, for a teacher whose distributions differ from row to row."""
    generator = torch.Generator().manual_seed(seed)
    batch = batch_of([[1]], [torch.randint(V, (40,), generator=generator).tolist()])
    rows = 3 * torch.randn(40, V, generator=generator)
    told = told_of(batch, rows, K)

    shifted = {name: value.roll(-1, 1) for name, value in told.items() if name.startswith(("head", "tail"))}

    teacher_scores_of(batch, told, top_k=K, vocabulary=V)
    with pytest.raises(ScoresError, match="shifted by one"):
        teacher_scores_of(batch, {**told, **shifted}, top_k=K, vocabulary=V)
