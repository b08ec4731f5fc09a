"""Prompts as tokens: texts, and conversations by the tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from miles_dmd.errors import ConfigError
from miles_dmd.modalities.language.options import LanguageOptions
from miles_dmd.prompts import messages_of
from miles_dmd.shown import short_repr


def prompt_tokens(tokenizer: Any, texts: Sequence[str], options: LanguageOptions) -> list[list[int]]:
    """Token ids of each prompt, at least one. Raises ConfigError for prompts that are too long, or empty.

    Of a conversation the template adds what begins the answer. A text is taken as it stands, with the tokens that the
    tokenizer itself puts around one.
    """
    found = [_tokens(tokenizer, text, options) for text in texts]
    if empty := [text for text, tokens in zip(texts, found, strict=True) if not tokens]:
        raise ConfigError(
            f"--prompt-data: {short_repr(empty[0])} has no token, and the first token of a response is predicted from "
            "the one before it; write a longer prompt"
        )
    long = [len(tokens) for tokens in found if len(tokens) > options.max_prompt_tokens]
    if long:
        raise ConfigError(
            f"--max-prompt-tokens {options.max_prompt_tokens}: {len(long)} of {len(texts)} prompts are longer, the "
            f"longest has {max(long)} tokens; name {max(long)}, or shorten them"
        )
    return found


def _tokens(tokenizer: Any, text: str, options: LanguageOptions) -> list[int]:
    messages = messages_of(text)
    if messages is None:
        return list(tokenizer(text)["input_ids"])
    if options.chat_template == "off" or tokenizer.chat_template is None:
        why = "--chat-template off refuses them" if options.chat_template == "off" else "the tokenizer has no template"
        raise ConfigError(f"--prompt-data: a prompt is messages, and {why}; write texts, or name another model")
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])
