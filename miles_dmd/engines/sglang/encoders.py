"""Comparison of a server's text encoders and tokenizers with those of the run's pipeline directory.

Encoders by the SHA-256 of every weight, which the stock server tells. Tokenizers have no weights: they are known by
what prompts become, the embeddings that a stock rollout request returns where it is asked for them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from miles_dmd.client import Client, Patience
from miles_dmd.engines.sglang import weights
from miles_dmd.engines.sglang.families import Served
from miles_dmd.engines.sglang.probe import SEED, Capabilities
from miles_dmd.engines.sglang.wire import ROLLOUT, Ask, Sampling, read_conditions, request_body
from miles_dmd.errors import EngineError, EngineRefused
from miles_dmd.modalities.diffusion.conditions import PromptTable
from miles_dmd.pipelines.weights import weight_files
from miles_dmd.training.export import LazyTensors

log = logging.getLogger(__name__)

PROMPTS = 8
"""Prompts whose embeddings are compared."""
LOOKED_AT = 4096
"""Prompts among which those are chosen."""
TOLERANCE = {"fp32": 1e-3, "bf16": 0.1}
"""Largest relative difference of a prompt's embedding. Measured with the digits teacher: 0.19 where one of three
tokenizers calls two words by each other's number, 0.85 for another encoder."""
PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""SGLang's names of precisions."""
STACKED = (
    (".q_proj.", ".k_proj.", ".v_proj.", ".qkv_proj."),
    (".SelfAttention.q.", ".SelfAttention.k.", ".SelfAttention.v.", ".SelfAttention.qkv_proj."),
)
"""Parameters that SGLang keeps as one, rows below rows: CLIP's, and T5's."""
ROWS = 64
"""SGLang pads T5's vocabulary to a multiple of it, with zeros."""


@dataclass(frozen=True, eq=False)
class Encoders:
    """Text encoders of the run, to compare servers with."""

    directory: Path
    family: Served
    dtype: str
    texts: Sequence[str]
    prompts: PromptTable
    """``texts`` as the trainers encode them."""
    sampling: Sampling
    by_weights: bool
    """True where weights are compared, too: not at a server that the run has started from this directory."""

    def require_same(self, client: Client, capabilities: Capabilities, patience: Patience) -> None:
        """Raises EngineRefused for a server that encodes prompts otherwise than the run."""
        if self.by_weights and capabilities.tp_size == 1:  # sharded, what is stacked here is in another order
            for component in self.family.text_encoders:
                self._require_weights(client, component)
        for prompt_id in self._chosen:
            self._require_embedding(client, capabilities, prompt_id, patience)

    def _require_weights(self, client: Client, component: str) -> None:
        try:
            weights.compare(client, self._digests(component, self.dtype), component)
        except EngineError as error:
            if "checksum mismatch" not in str(error):  # names that another release has made
                log.warning("%s: weights of %s cannot be compared: %s", client.url, component, error)
                return
            raise EngineRefused(
                f"{client.url} has another {component} than {self.directory}: {self._cure(client, component)}"
            ) from error

    def _cure(self, client: Client, component: str) -> str:
        for precision in PRECISIONS:
            with contextlib.suppress(EngineError):
                weights.compare(client, self._digests(component, precision), component)
                wanted = " ".join(self.family.encoder_precisions(self.dtype))
                return f"it holds it in {precision}; start it with --text-encoder-precisions {wanted}"
        return "serve --hf-checkpoint there"

    @functools.cache  # noqa: B019 - lives as long as its engine
    def _digests(self, component: str, precision: str) -> Mapping[str, str]:
        return {
            name: weights.digest(value.to(PRECISIONS[precision]))
            for name, value in as_served(weight_files(self.directory / component))
        }

    @functools.cached_property
    def _chosen(self) -> tuple[int, ...]:
        """Prompts with the most different words: each next one has the most that none before it has."""
        left = [(index, frozenset(text.split())) for index, text in enumerate(self.texts[:LOOKED_AT])]
        seen: frozenset[str] = frozenset()
        chosen: list[int] = []
        for _ in range(min(PROMPTS, len(left))):
            index, words = max(left, key=lambda entry: len(entry[1] - seen))
            if chosen and not words - seen:
                break
            left.remove((index, words))
            chosen.append(index)
            seen |= words
        return tuple(chosen)

    def _require_embedding(
        self, client: Client, capabilities: Capabilities, prompt_id: int, patience: Patience
    ) -> None:
        text = self.texts[prompt_id]
        ask = Ask(text=text, seed=SEED, stop_step=0, stops=capabilities.stops)
        body = {**request_body(self.sampling, ask), "rollout_return_denoising_env": True}
        expected = {name: value[0] for name, value in self.prompts.lookup([prompt_id]).items()}
        shapes = {name: tuple(value.shape) for name, value in expected.items()}
        found = read_conditions(client.content(ROLLOUT, body, patience=patience), shapes, client.url)
        for name, value in expected.items():
            apart = _apart(found[name], value)
            if apart > TOLERANCE[self.dtype]:
                raise EngineRefused(
                    f"{client.url} encodes {text[:60]!r} otherwise than the run ({name} differs by {apart:.2g} of its "
                    f"size): it has other text encoders or tokenizers than {self.directory}, or another precision; "
                    f"serve --hf-checkpoint there, with --text-encoder-precisions "
                    f"{' '.join(self.family.encoder_precisions(self.dtype))}"
                )


def _apart(found: Tensor, expected: Tensor) -> float:
    found, expected = found.float(), expected.float()
    return float((found - expected).norm() / expected.norm().clamp_min(1e-12))


def as_served(files: Sequence[Path]) -> Iterator[tuple[str, Tensor]]:
    """(name, value) of each parameter of a text encoder as SGLang names and stacks them, one in memory at a time."""
    stored = LazyTensors(files)
    for name, parts in sorted(_stacked(stored).items()):
        value = torch.cat([stored[part] for part in parts])
        if name == "shared.weight":
            value = torch.nn.functional.pad(value, (0, 0, 0, -len(value) % ROWS))
        yield name, value


def _stacked(names: Collection[str]) -> dict[str, list[str]]:
    """SGLang's name -> those of the file of which it is made."""
    found: dict[str, list[str]] = {}
    for name in names:
        if name.endswith("position_ids") or (name == "encoder.embed_tokens.weight" and "shared.weight" in names):
            continue  # a buffer, and a second name of the same table
        rule = next((rule for rule in STACKED if any(part in name for part in rule[:3])), None)
        if rule is None:
            found[_served_name(name)] = [name]
        elif rule[0] in name:
            found[_served_name(name.replace(rule[0], rule[3]))] = [name.replace(rule[0], part) for part in rule[:3]]
    return found


def _served_name(name: str) -> str:
    bare = name.startswith(("embeddings.", "encoder.layers.", "final_layer_norm."))  # of CLIP, without its wrapper
    return f"{'text_model.' if bare else ''}{name}".replace(".out_proj.", ".proj.")
