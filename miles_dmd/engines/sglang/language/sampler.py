"""Rollout engine over SGLang's language-model servers: one request a response, all of one policy version."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from miles_dmd.client import Client, Patience
from miles_dmd.contracts.engine import RolloutRequest
from miles_dmd.engines.sglang.delivery import Delivery
from miles_dmd.engines.sglang.fleet_engine import ServedEngine, clients_of
from miles_dmd.engines.sglang.folders import sweep, weights_root
from miles_dmd.engines.sglang.language import weights
from miles_dmd.engines.sglang.language.fleet import TokenFleet, TokenServer
from miles_dmd.errors import EngineError, EngineUnavailable
from miles_dmd.modalities.language.batch import TokenBatch
from miles_dmd.modalities.language.family import language_family
from miles_dmd.modalities.language.options import language_options
from miles_dmd.modalities.language.prompts import prompt_tokens
from miles_dmd.modalities.language.server import GENERATE, Response, read_response, sample_request
from miles_dmd.pipelines.weights import stored_tensors
from miles_dmd.training.compute import DTYPES, Compute
from miles_dmd.training.export import exported_buckets

if TYPE_CHECKING:
    from miles_dmd.config.args import Args
    from miles_dmd.contracts.engine import BuildEngine

log = logging.getLogger(__name__)

PROBE_TOKENS = 8
"""Tokens of an admission sample."""


class TokenEngine(ServedEngine[TokenServer]):
    def __init__(
        self,
        args: Args,
        clients: Sequence[Client],
        prompts: Sequence[Sequence[int]],
        *,
        directory: Path,
        end_ids: Sequence[int],
        max_new_tokens: int,
    ) -> None:
        """``prompts``: token ids by prompt id; ``directory``: the student's checkpoint, weights of version 0."""
        super().__init__(args)
        self.prompts, self.directory = tuple(map(tuple, prompts)), directory
        self.end_ids, self.max_new_tokens = tuple(end_ids), max_new_tokens
        self.dtype, self.stored = DTYPES[args.compute_dtype], stored_tensors(directory) or {}
        self.fleet: TokenFleet
        longest = max(map(len, self.prompts)) + max_new_tokens
        self.fleet = TokenFleet(clients, self.options, args.compute_dtype, longest, self._probe)
        if self.options.verify_weights != "off":
            self._hold_the_checkpoint()
        self.notes = tuple(map(str, self.fleet.members))

    # -- sampling ---------------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[RolloutRequest]) -> TokenBatch:
        version = self.held()

        def take(member: TokenServer, request: RolloutRequest) -> Response:
            if member.version != version:
                raise EngineUnavailable(
                    f"{member.client.url} holds version {member.version}, and the run's is {version}"
                )
            return self._response(member, self.prompts[request.prompt_id], request.seed, self.max_new_tokens)

        responses = self.drawn(requests, take)
        return self._batch(requests, responses, version)

    def _response(
        self, member: TokenServer, prompt: Sequence[int], seed: int, length: int, patience: Patience | None = None
    ) -> Response:
        body = sample_request(prompt, seed=seed, max_new_tokens=length, end_ids=self.end_ids)
        answer = member.client.post(GENERATE, body, patience=patience)
        return read_response(
            answer, prompt, max_new_tokens=length, end_ids=self.end_ids, version=member.tag, who=member.client.url
        )

    def _batch(self, requests: Sequence[RolloutRequest], responses: Sequence[Response], version: int) -> TokenBatch:
        prompts = [self.prompts[request.prompt_id] for request in requests]
        rows = [[*prompt, *response.tokens] for prompt, response in zip(prompts, responses, strict=True)]
        return TokenBatch(
            ids=tuple(request.sample_id for request in requests),
            prompt_ids=tuple(request.prompt_id for request in requests),
            prompt_lengths=tuple(map(len, prompts)),
            response_lengths=tuple(len(response.tokens) for response in responses),
            tokens=_padded(rows, torch.int64),
            logprobs=_padded([response.logprobs for response in responses], torch.float32),
            policy_version=version,
            run_seed=self.args.seed,
        )

    def _probe(self, member: TokenServer, patience: Patience) -> None:
        """Two samples of one seed: that it samples, and whether it does so again."""
        length = min(PROBE_TOKENS, self.max_new_tokens)
        first, second = (self._response(member, self.prompts[0], 2**62 + 12345, length, patience) for _ in range(2))
        member.repeats = first.tokens == second.tokens

    # -- weights ----------------------------------------------------------------------------------------------------

    def _push(self, buckets: Iterable[Mapping[str, Tensor]], delivery: Delivery[TokenServer]) -> None:
        # a request would need a payload for each device of a server
        on_cpu = all(member.device == "cpu" and member.tp_size == 1 for member in self.fleet.members)
        transport = self.transport(delivery, on_cpu=on_cpu, more={"flush_cache": False})
        update = weights.Update(delivery, self.stored, self.dtype, self.fleet.tag(delivery.version))
        update.push(buckets, transport, self.options)

    def _hold_the_checkpoint(self) -> None:
        """Version 0 is --hf-checkpoint: servers that another run has used are given it."""
        expected = weights.Expected()
        for bucket in exported_buckets(self.directory, ()):
            expected.add({name: value.to(self.dtype) for name, value in bucket.items()})
        for member in self.fleet.members:
            try:
                weights.compare(member, expected.digests)
            except EngineError:
                log.warning("%s holds other weights than %s; it is given those", member.client.url, self.directory)
                self.update_weights(exported_buckets(self.directory, ()), 0)
                break
        for member in self.fleet.members:
            member.compared = False  # with weights of the run's own


def build(
    args: Args, *, compute: Compute, prompts: None, texts: Sequence[str] = (), servers: Sequence[str] = ()
) -> TokenEngine:
    code, own, directory = language_family(args).code(), language_options(args), args.pipeline_directory
    sweep(weights_root(args))
    return TokenEngine(
        args,
        clients_of(args.engine_options, servers),
        prompt_tokens(code.open_tokenizer(directory), texts, own),
        directory=directory,
        end_ids=code.end_tokens(directory),
        max_new_tokens=own.max_new_tokens,
    )


if TYPE_CHECKING:  # mypy compares what the engine type names as text
    _build: BuildEngine = build


def _padded(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
    """[B, longest], padded on the right with 0."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], dtype=dtype)
