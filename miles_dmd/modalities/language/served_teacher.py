"""Teacher scores from SGLang servers: one request a sample, retried, and from another server where one fails."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from miles_dmd.client import Client
from miles_dmd.errors import EngineError, EngineMisanswer, EngineRefused, EngineUnavailable
from miles_dmd.modalities.language.batch import TokenBatch
from miles_dmd.modalities.language.server import GENERATE, Scores, read_scores, score_request

log = logging.getLogger(__name__)

FIELDS = ("head_ids", "head_logprobs", "observed_logprobs", "tail_logprobs")
"""Keys of what ``score`` gives: the same, of the same shapes, as a teacher group's."""


class ServedTeacher:
    """A frozen teacher behind one or several servers that all hold it. Nothing is cached, and nothing made up: a sample
    that no server scores is an error that names it."""

    def __init__(self, clients: Sequence[Client], *, top_k: int, concurrency: int) -> None:
        """``concurrency``: requests under way at one server. Raises EngineError for a server that cannot be used."""
        self.clients, self.top_k, self.concurrency = tuple(clients), top_k, concurrency
        self.versions = {client: _weights_of(client) for client in self.clients}

    def score(self, batch: TokenBatch) -> dict[str, Tensor]:
        """``FIELDS``: [B, R, K] ids int32 and log-probs fp32, [B, R] fp32; 0 in padding. Raises EngineError."""
        threads = ThreadPoolExecutor(len(self.clients) * self.concurrency)
        try:
            futures = [threads.submit(self._one, batch, row) for row in range(len(batch))]
            found = [future.result() for future in futures]
        finally:
            threads.shutdown(wait=True, cancel_futures=True)
        width = batch.logprobs.shape[1]
        return {name: torch.stack([_padded(getattr(scores, name), width) for scores in found]) for name in FIELDS}

    def _one(self, batch: TokenBatch, row: int) -> Scores:
        """From the server whose turn it is, or else from the next that answers."""
        turn = row % len(self.clients)
        failures = []
        for client in (*self.clients[turn:], *self.clients[:turn]):
            try:
                return self._asked(client, batch, row)
            except EngineUnavailable as error:
                failures.append(str(error))
                log.warning("sample %d is not scored: %s", batch.ids[row], error)
        raise EngineUnavailable(f"sample {batch.ids[row]}: no teacher server answers: {'; '.join(failures)}")

    def _asked(self, client: Client, batch: TokenBatch, row: int) -> Scores:
        who, prompt = f"{client.url}, sample {batch.ids[row]}", batch.prompt_lengths[row]
        tokens = batch.tokens[row, : prompt + batch.response_lengths[row]].tolist()
        try:
            answer = client.post(GENERATE, score_request(tokens, prompt, self.top_k))
        except EngineRefused as error:
            raise EngineRefused(f"sample {batch.ids[row]}: {error}") from error
        scores = read_scores(answer, tokens, prompt, self.top_k, who)
        if (now := str(answer["meta_info"].get("weight_version"))) != self.versions[client]:
            raise EngineMisanswer(
                f"{who}: scored with weights {now}, and they were {self.versions[client]} when the run started: a "
                "teacher is frozen, so nobody else may update its server"
            )
        return scores

    def close(self) -> None:
        for client in self.clients:
            client.close()


@functools.cache
def connected(urls: tuple[str, ...], top_k: int) -> ServedTeacher:
    """The teacher of this process at these servers, asked for what it is once."""
    return connect(urls, top_k=top_k)


def connect(
    urls: Sequence[str], *, top_k: int, concurrency: int = 4, timeout: float = 600.0, deadline: float = 60.0
) -> ServedTeacher:
    """``timeout``: seconds for one answer; ``deadline``: seconds over which a failure is repeated at a server."""
    clients = [Client(url, timeout=timeout, deadline=deadline, connections=concurrency) for url in urls]
    try:
        return ServedTeacher(clients, top_k=top_k, concurrency=concurrency)
    except EngineError:
        for client in clients:
            client.close()
        raise


def require_same_tokens(client: Client, texts: Sequence[str], expected: Sequence[Sequence[int]]) -> None:
    """Raises EngineRefused for a server whose tokenizer makes other ids of ``texts``, without special tokens, than
    ``expected``: its scores would be of other words."""
    for text, tokens in zip(texts, expected, strict=True):
        answer = client.post("/tokenize", {"prompt": text, "add_special_tokens": False})
        if answer.get("tokens") != list(tokens):
            raise EngineRefused(
                f"{client.url} makes other tokens of {text[:60]!r} than the run: serve a model with the same tokenizer"
            )


def _weights_of(client: Client) -> str:
    """Its version of the weights. Raises EngineError for a server that generates no text."""
    model = client.get("/model_info")
    if model.get("is_generation") is not True:
        kinds = model.get("architectures") or ["nothing known"]
        raise EngineRefused(f"{client.url} serves {kinds[0]}, which generates no text: serve a language model there")
    return str(model.get("weight_version"))


def _padded(value: Tensor, width: int) -> Tensor:
    return torch.cat([value, value.new_zeros(width - len(value), *value.shape[1:])])
