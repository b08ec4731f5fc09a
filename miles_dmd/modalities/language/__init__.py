"""Language models: causal transformers that sample responses to prompts, token by token."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from miles_dmd.contracts.modality import Modality
from miles_dmd.modalities.language.options import LanguageOptions
from miles_dmd.modalities.language.record import LanguageRecord, describe, read_record
from miles_dmd.modalities.language.requests import requests
from miles_dmd.modalities.language.rules import RULES, rows
from miles_dmd.modalities.language.texts import METRICS, sample_texts

if TYPE_CHECKING:
    from miles_dmd.preflight.resolved import ResolvedRun


def usage(run: ResolvedRun, directory: Path, record: LanguageRecord) -> str:
    """For the console: the calls that open the student."""
    return "\n".join(
        [
            f"  weights: {record.weights or 'unknown'}",
            f"  model = AutoModelForCausalLM.from_pretrained({str(directory)!r})",
            f"  tokenizer = AutoTokenizer.from_pretrained({str(directory)!r})",
        ]
    )


modality = Modality(
    options=LanguageOptions,
    strategies=frozenset({"on_policy_tokens"}),
    family="causal_lm",
    code="miles_dmd.modalities.language.code",
    requests=requests,
    samples=sample_texts,
    describe=describe,
    read_record=read_record,
    usage=usage,
    rows=rows,
    rules=RULES,
    metrics=METRICS,
    not_counted="the cache of keys and values",
)
