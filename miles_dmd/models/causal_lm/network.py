"""Causal language models with torch: network, tokenizer, end tokens, by transformers' Auto classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from miles_dmd.modalities.language.family import LanguageCode
    from miles_dmd.models.causal_lm import network


def build_network(directory: Path) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    model: nn.Module = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return model


def end_tokens(directory: Path) -> Sequence[int]:
    """Of generation_config.json, which some models write wider than config.json, else of config.json."""
    from transformers import AutoConfig, GenerationConfig

    found: Any = None
    if (directory / "generation_config.json").is_file():
        found = GenerationConfig.from_pretrained(str(directory), local_files_only=True).eos_token_id
    if found is None:
        found = AutoConfig.from_pretrained(str(directory), local_files_only=True).eos_token_id
    return () if found is None else tuple(found) if isinstance(found, list | tuple) else (int(found),)


def open_tokenizer(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)


if TYPE_CHECKING:  # mypy compares this module, which the family names as text
    _code: LanguageCode = network
