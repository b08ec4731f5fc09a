"""Teacher scores at the student's door: checked, and gathered to the valid response tokens.

Each refusal names the field, the sample, the response position, the value and a cure. Padding may hold anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from miles_dmd.errors import ScoresError
from miles_dmd.losses.resopd import TOLD
from miles_dmd.modalities.language.batch import TokenBatch

SLACK = 1e-4
"""Log-probs may round above 0 by so much."""
MASS_SLACK = 1e-3
SCORE_SLACK = 1e-3
"""Two scores of one token, by one teacher, may differ by so much."""
OBSERVED_IDS = "observed_ids"
"""Optional: the token that a score is about, as its teacher read it."""
LOGPROBS = ("head_logprobs", "observed_logprobs", "tail_logprobs")
ALIGNMENT = "is the payload shifted by one? Row P + t - 1 scores response token t"


@dataclass(frozen=True, slots=True)
class Scores:
    """Teacher scores of N valid response tokens, sample-major."""

    head_ids: Tensor
    """[N, K] int64, without duplicates."""
    head_logprobs: Tensor
    """[N, K] fp32."""
    observed_ids: Tensor
    """[N] int64: the tokens that were sampled."""
    observed_logprobs: Tensor
    """[N] fp32."""
    tail_logprobs: Tensor
    """[N] fp32: log of the mass outside of the head; -inf where there is none."""

    @property
    def in_head(self) -> Tensor:
        """[N, K] bool: the head's entry is the sampled token."""
        return self.head_ids == self.observed_ids[:, None]


def teacher_scores_of(batch: TokenBatch, told: Mapping[str, Tensor] | None, *, top_k: int, vocabulary: int) -> Scores:
    """Scores of the valid tokens of ``batch``, for a student of that ``vocabulary``. Raises ScoresError."""
    if told is None:
        raise ScoresError(
            f"the student got no teacher scores of samples {_few(batch.ids)}; the teacher group must score each batch "
            "before the actor trains on it"
        )
    _check_shapes(batch, told, top_k)
    mask = batch.mask
    rows = {name: value.to(mask.device)[mask] for name, value in told.items() if name in (*TOLD, OBSERVED_IDS)}
    scores = Scores(
        head_ids=rows["head_ids"].long(),
        head_logprobs=rows["head_logprobs"],
        observed_ids=batch.observed[mask],
        observed_logprobs=rows["observed_logprobs"],
        tail_logprobs=rows["tail_logprobs"],
    )
    own = rows.get(OBSERVED_IDS, scores.observed_ids)
    _check_values(batch, mask, scores, own, vocabulary)
    return scores


def _check_shapes(batch: TokenBatch, told: Mapping[str, Tensor], top_k: int) -> None:
    if empty := [i for i, length in zip(batch.ids, batch.prompt_lengths, strict=True) if length < 1]:
        raise ScoresError(
            f"sample {empty[0]} has a prompt of no tokens, so that no logits predict its first response token; begin "
            "prompts with a token, such as the beginning of text"
        )
    size, length = batch.logprobs.shape
    for name in (*TOLD, *(name for name in told if name == OBSERVED_IDS)):
        if name not in told:
            raise ScoresError(
                f"teacher scores of samples {_few(batch.ids)} lack {name}; there are "
                f"{', '.join(sorted(told)) or 'none'}: ask the teacher again"
            )
        value = told[name]
        shape = (size, length, top_k) if name.startswith("head") else (size, length)
        if tuple(value.shape) != shape:
            raise ScoresError(
                f"teacher scores of samples {_few(batch.ids)}: {name} has shape {list(value.shape)} and must have "
                f"{list(shape)}, samples x response tokens{' x --opd-top-k' if len(shape) == 3 else ''}; score the "
                "same batch with the same --opd-top-k"
            )
        kinds = (torch.int32, torch.int64) if name.endswith("ids") else (torch.float32,)
        if value.dtype not in kinds:
            raise ScoresError(
                f"teacher scores of samples {_few(batch.ids)}: {name} has dtype {_dtype(value.dtype)} and must have "
                f"{' or '.join(map(_dtype, kinds))}; coarser log-probs lose the mass of the tail"
            )


def _check_values(batch: TokenBatch, mask: Tensor, scores: Scores, told_ids: Tensor, vocabulary: int) -> None:
    """One reading of a flag from the device where all is well."""
    found = [(wrong, words) for wrong, words in _faults(scores, told_ids, vocabulary)]
    if not torch.stack([wrong.any() for wrong, _ in found]).any():
        return
    for wrong, words in found:
        if (row := _first(wrong)) is not None:
            sample, position = (int(axis[row]) for axis in mask.nonzero(as_tuple=True))
            raise ScoresError(
                f"teacher scores of sample {batch.ids[sample]}, response position {position}: {words(row)}"
                f"{_times(wrong)}"
            )


def _faults(scores: Scores, told_ids: Tensor, vocabulary: int) -> list[tuple[Tensor, Callable[[int], str]]]:
    """(which of [N] or [N, K] are wrong, a message about the row n), in the order in which one explains the next."""
    ids, head, observed = scores.head_ids, scores.head_logprobs, scores.observed_logprobs
    return [
        *(_not_finite(name, getattr(scores, name), allow_none=name == "tail_logprobs") for name in LOGPROBS),
        *(_above_zero(name, getattr(scores, name)) for name in LOGPROBS),
        (
            (ids < 0) | (ids >= vocabulary),
            lambda n: (
                f"head id {_odd(ids[n], vocabulary)} is outside of the student's vocabulary of {vocabulary}; "
                "student and teacher need one tokenizer"
            ),
        ),
        (
            _duplicates(ids),
            lambda n: (
                f"head ids {ids[n].tolist()} name a token twice, whose mass would count twice; ask for distinct tokens"
            ),
        ),
        (
            head.exp().sum(1) > 1 + MASS_SLACK,
            lambda n: (
                f"the head's probabilities add up to {float(head[n].exp().sum()):.6g}, more than 1; "
                "head_logprobs must be normalised over the whole vocabulary"
            ),
        ),
        (
            told_ids != scores.observed_ids,
            lambda n: (
                f"observed_ids has {int(told_ids[n])} where the student sampled {int(scores.observed_ids[n])}; "
                f"{ALIGNMENT}"
            ),
        ),
        *_misaligned(scores, head, observed),
    ]


def _misaligned(scores: Scores, head: Tensor, observed: Tensor) -> list[tuple[Tensor, Callable[[int], str]]]:
    """Faults of the sampled token's score beside the head's scores."""
    hit = scores.in_head.any(1)
    in_head = head.where(scores.in_head, 0).sum(1)
    least = head.min(1).values

    def token(n: int) -> str:
        return f"the sampled token {int(scores.observed_ids[n])}"

    return [
        (
            hit & ((observed - in_head).abs() > SCORE_SLACK),
            lambda n: (
                f"{token(n)} has observed_logprobs {float(observed[n]):.6g} and, in the head, "
                f"{float(in_head[n]):.6g}; {ALIGNMENT}"
            ),
        ),
        (
            ~hit & (observed > least + SCORE_SLACK),
            lambda n: (
                f"{token(n)} is not in the head and has observed_logprobs {float(observed[n]):.6g}, above the "
                f"head's least, {float(least[n]):.6g}; the head must be the teacher's top-k, or {ALIGNMENT}"
            ),
        ),
    ]


def _not_finite(name: str, value: Tensor, *, allow_none: bool) -> tuple[Tensor, Callable[[int], str]]:
    wrong = ~torch.isfinite(value)
    if allow_none:
        wrong &= value != -torch.inf  # a head that holds all of the mass leaves no tail
    return (
        wrong,
        lambda n: (
            f"{name} is {_of(value, wrong, n)}; the teacher's answer is broken (weights, precision, or an aborted request)"
        ),
    )


def _above_zero(name: str, value: Tensor) -> tuple[Tensor, Callable[[int], str]]:
    wrong = value > SLACK
    return wrong, lambda n: f"{name} is {_of(value, wrong, n)}, above 0; pass logs of probabilities, not logits"


def _duplicates(ids: Tensor) -> Tensor:
    """[N] bool: some token stands twice in the row."""
    ordered = ids.sort(1).values
    return (ordered[:, 1:] == ordered[:, :-1]).any(1)


def _of(value: Tensor, wrong: Tensor, row: int) -> str:
    """The first wrong value of a row."""
    return f"{float(value[row][wrong[row]].flatten()[0]):.6g}"


def _odd(ids: Tensor, vocabulary: int) -> int:
    return int(ids[(ids < 0) | (ids >= vocabulary)][0])


def _first(wrong: Tensor) -> int | None:
    rows = wrong.reshape(len(wrong), -1).any(1).nonzero()
    return int(rows[0]) if len(rows) else None


def _times(wrong: Tensor) -> str:
    count = int(wrong.sum())
    return f" (the first of {count})" if count > 1 else ""


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _few(ids: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, ids[:8]))}{', ...' if len(ids) > 8 else ''}"
