"""Requests to SGLang's language-model server, /generate, and its answers, validated: scores and samples.

Ids are always those that were sent, never those that an answer repeats: it calls the last id of the vocabulary 0.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from miles_dmd.errors import EngineMisanswer, EngineUnavailable

GENERATE = "/generate"
SLACK = 1e-4
"""Largest log-prob that rounding may leave above 0."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Teacher scores of one response of R tokens; see ``read_scores``."""

    head_ids: Tensor
    """[R, K] int32, best first."""
    head_logprobs: Tensor
    """[R, K] fp32."""
    observed_logprobs: Tensor
    """[R] fp32."""
    tail_logprobs: Tensor
    """[R] fp32: log of the mass outside of the head."""


@dataclass(frozen=True, slots=True)
class Response:
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Under the distribution that each token was drawn from: temperature 1, full support."""


# -- scores -----------------------------------------------------------------------------------------------------------


def score_request(tokens: Sequence[int], prompt_length: int, top_k: int) -> dict[str, Any]:
    """Body that asks for scores of ``tokens[prompt_length:]``, without a token more.

    ``logprob_start_len`` P - 1 gives the R rows that predict the response, behind one without a score, and leaves the
    prompt's prefix in the server's cache; 0 would score the whole prompt, P would lose the first token's score.
    ``top_k`` above the vocabulary ends the server, 0.5.23 at least: the caller sees to that.
    """
    return {
        "input_ids": list(tokens),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": prompt_length - 1,
        "top_logprobs_num": top_k,
        "return_flat_raw_top_logprobs": True,  # a release that does not know them answers in nested lists
        "return_flat_raw_top_logprobs_b64": True,
    }


def read_scores(answer: Mapping[str, Any], tokens: Sequence[int], prompt_length: int, top_k: int, who: str) -> Scores:
    """``who`` names server and sample in errors. Raises EngineMisanswer for an answer without R whole rows."""
    meta = _finished(answer, who)
    rows = len(tokens) - prompt_length
    _require_length(meta, "prompt_tokens", len(tokens), who)
    observed = _observed(meta, tokens, prompt_length, who)
    if "input_top_logprobs_shape" in meta:
        values, ids = _flat_head(meta, rows, top_k, who)
    else:
        values, ids = _nested_head(meta, rows, top_k, who)
    for name, value in (("observed token", observed), ("head", values)):
        _require_logprobs(value, name, who)
    return Scores(ids, values, observed, tail_logprobs(values))


def tail_logprobs(head: Tensor) -> Tensor:
    """[R] fp32: log(1 - sum of exp(head)) of [R, K] log-probs, in fp64; finite where the head has all the mass."""
    mass = head.double().logsumexp(-1).clamp(max=-torch.finfo(torch.float32).eps)
    return torch.where(mass > -math.log(2), (-mass.expm1()).log(), (-mass.exp()).log1p()).float()


def _observed(meta: Mapping[str, Any], tokens: Sequence[int], prompt_length: int, who: str) -> Tensor:
    """[R] fp32. The first entry is that of the prompt's last token, which has no score."""
    entries = _rows(meta, "input_token_logprobs", len(tokens) - prompt_length, who)
    for place, entry in enumerate(entries):
        said, wanted = entry[1], tokens[prompt_length + place]
        if said != wanted and said != 0:  # the last id of the vocabulary is called 0
            raise EngineMisanswer(f"{who}: token {place} of the response is {wanted}, and the answer scores {said}")
    return _tensor([entry[0] for entry in entries], "input_token_logprobs", who)


def _nested_head(meta: Mapping[str, Any], rows: int, top_k: int, who: str) -> tuple[Tensor, Tensor]:
    entries = _rows(meta, "input_top_logprobs", rows, who)
    if wrong := {len(entry) for entry in entries} - {top_k}:
        raise EngineMisanswer(f"{who}: the answer has {sorted(wrong)} scores a token; {top_k} were asked for")
    values = _tensor([[value for value, *_ in entry] for entry in entries], "input_top_logprobs", who)
    ids = torch.tensor([[token for _, token, *_ in entry] for entry in entries], dtype=torch.int32)
    return values, ids


def _rows(meta: Mapping[str, Any], name: str, rows: int, who: str) -> Sequence[Any]:
    entries = meta.get(name)
    if not isinstance(entries, list) or len(entries) != rows + 1:
        found = f"{len(entries)} rows" if isinstance(entries, list) else "nothing"
        raise EngineMisanswer(f"{who}: {name} has {found}; {rows} and one in front were asked for")
    first = entries[0]
    if first is not None and first[0] is not None:
        raise EngineMisanswer(f"{who}: the first row of {name} has a score, so rows are those of other tokens")
    return entries[1:]


def _flat_head(meta: Mapping[str, Any], rows: int, top_k: int, who: str) -> tuple[Tensor, Tensor]:
    shape, prefix = meta["input_top_logprobs_shape"], meta.get("input_top_logprobs_null_prefix")
    if shape != [rows, top_k] or prefix != 1:
        raise EngineMisanswer(
            f"{who}: the answer has scores of shape {shape} behind {prefix} empty rows; [{rows}, {top_k}] behind 1 "
            "were asked for"
        )
    values = _flat(meta, "input_top_logprobs_val_flat", torch.float32, who)
    ids = _flat(meta, "input_top_logprobs_idx_flat", torch.int32, who)
    if not len(values) == len(ids) == rows * top_k:
        raise EngineMisanswer(f"{who}: {len(values)} scores and {len(ids)} ids do not have the shape {shape}")
    return values.view(rows, top_k), ids.view(rows, top_k)


def _flat(meta: Mapping[str, Any], name: str, dtype: torch.dtype, who: str) -> Tensor:
    if f"{name}_b64" not in meta:
        return _tensor(meta.get(name), name, who, dtype)
    said = meta.get(f"{name}_b64_dtype")
    if f"torch.{said}" != str(dtype):
        raise EngineMisanswer(f"{who}: {name} is {said}, not {dtype}")
    try:
        data = bytearray(base64.b64decode(meta[f"{name}_b64"], validate=True))
        return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    except (TypeError, ValueError) as error:
        raise EngineMisanswer(f"{who}: {name} cannot be decoded ({error})") from error


# -- samples ----------------------------------------------------------------------------------------------------------


def sample_request(prompt: Sequence[int], *, seed: int, max_new_tokens: int, end_ids: Sequence[int]) -> dict[str, Any]:
    """Body that asks for one response at temperature 1 and full support, whatever the server would do by itself."""
    return {
        "input_ids": list(prompt),
        "sampling_params": {
            "max_new_tokens": max_new_tokens,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "min_new_tokens": 0,
            "sampling_seed": seed % 2**63,
            "stop_token_ids": list(end_ids),
        },
        "return_logprob": True,
        "logprob_start_len": -1,
    }


def read_response(
    answer: Mapping[str, Any], prompt: Sequence[int], *, max_new_tokens: int, end_ids: Sequence[int], version: str,
    who: str,
) -> Response:  # fmt: skip
    """``version`` names the weights that every token must be of. Raises EngineMisanswer; EngineUnavailable where they
    are others, as those of a server that was restarted."""
    meta = _finished(answer, who)
    _require_length(meta, "prompt_tokens", len(prompt), who)
    tokens, entries = answer.get("output_ids"), meta.get("output_token_logprobs")
    if not tokens or not isinstance(entries, list) or tokens != [entry[1] for entry in entries]:
        raise EngineMisanswer(f"{who}: the answer has no tokens, or log-probs of others")
    _require_end(tokens, meta["finish_reason"], max_new_tokens, end_ids, who)
    spans = meta.get("weight_versions") or [{"version": meta.get("weight_version")}]
    if other := sorted({str(span.get("version")) for span in spans} - {version}):
        raise EngineUnavailable(f"{who}: sampled with weights {', '.join(other)}, and the run's are {version}")
    logprobs = _tensor([entry[0] for entry in entries], "output_token_logprobs", who)
    _require_logprobs(logprobs, "response", who)
    return Response(tuple(tokens), tuple(logprobs.tolist()))


def _require_end(
    tokens: Sequence[int], reason: Mapping[str, Any], max_new_tokens: int, end_ids: Sequence[int], who: str
) -> None:
    """A response ends with its first end token, or is as long as may be: else the server has other end tokens."""
    ends = [place for place, token in enumerate(tokens) if token in end_ids]
    if ends[:1] == [len(tokens) - 1] or (not ends and len(tokens) == max_new_tokens):
        return
    raise EngineMisanswer(
        f"{who}: a response of {len(tokens)} tokens ends with {tokens[-1]} ({reason.get('type')}); the run's end after "
        f"{max_new_tokens} or with {', '.join(map(str, end_ids)) or 'no token'}: serve a model with the same end tokens"
    )


# -- both -------------------------------------------------------------------------------------------------------------


def _finished(answer: Mapping[str, Any], who: str) -> Mapping[str, Any]:
    """The answer's meta_info. Raises EngineMisanswer for a request that was aborted, whatever it brings."""
    meta = answer.get("meta_info")
    reason = meta.get("finish_reason") if isinstance(meta, dict) else None
    if not isinstance(meta, dict) or not isinstance(reason, dict):
        raise EngineMisanswer(f"{who}: the answer has no meta_info with a finish_reason")
    if reason.get("type") not in ("length", "stop"):
        raise EngineMisanswer(f"{who}: the server ended the request with {reason.get('type')} {reason.get('message')}")
    return meta


def _require_length(meta: Mapping[str, Any], name: str, expected: int, who: str) -> None:
    if meta.get(name) != expected:
        raise EngineMisanswer(f"{who}: the server counts {meta.get(name)} {name}, and was sent {expected}")


def _tensor(values: Any, name: str, who: str, dtype: torch.dtype = torch.float32) -> Tensor:
    try:
        return torch.tensor(values, dtype=dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise EngineMisanswer(f"{who}: {name} has entries that are no numbers ({error})") from error


def _require_logprobs(values: Tensor, name: str, who: str) -> None:
    bad = ~(torch.isfinite(values) & (values <= SLACK))
    if bad.any():
        place = bad.nonzero()[0].tolist()
        raise EngineMisanswer(
            f"{who}: {int(bad.sum())} scores of the {name} are no log-probs, the first {values[tuple(place)].item()} "
            f"of token {place[0]}"
        )
