"""Options of language models: lengths of prompts and responses, chat template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from miles_dmd.config.values import Count

if TYPE_CHECKING:
    from miles_dmd.config.args import Args


@dataclass(frozen=True, kw_only=True)
class LanguageOptions:
    max_new_tokens: Count = 128
    """Most tokens of a response; one that has no end by then is cut there, and trains like any other."""
    max_prompt_tokens: Count = 1024
    """Most tokens of a prompt; a longer one is refused when the run starts."""
    chat_template: Literal["auto", "off"] = "auto"
    """auto writes prompts that are messages by the tokenizer's chat template; off refuses them."""


def language_options(args: Args) -> LanguageOptions:
    """The language options of a run of this modality."""
    found: LanguageOptions = args.modality_options
    return found
