"""Text of the models: Python's own help topics, which every installation has, and prompts cut from it.

Topics are documents, each ended by the end token; every tenth is held out. Python's versions differ in the text, so the
prompts are shipped, and the models with them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

BYTES = 256
END = "<|end|>"
END_ID = BYTES
SHORTEST, LONGEST = 16, 32
"""Characters of a prompt."""


def documents() -> tuple[list[str], list[str]]:
    """(held in, held out): the topics in alphabetical order, and every tenth of them."""
    from pydoc_data.topics import topics

    texts = [topics[name].strip() for name in sorted(topics)]
    return [text for number, text in enumerate(texts) if number % 10], texts[::10]


def encoded(texts: Iterable[str]) -> list[int]:
    """Bytes of all texts, one after another, each ended by the end token."""
    return [token for text in texts for token in (*text.encode(), END_ID)]


def prompts(texts: Sequence[str], count: int, seed: int) -> list[str]:
    """Different windows of random place and length, without white space at their ends."""
    draw = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        text = draw.choices(texts, weights=[len(one) for one in texts])[0]
        length = draw.randint(SHORTEST, LONGEST)
        start = draw.randrange(max(len(text) - length, 1))
        window = text[start : start + length].strip()
        if len(window) >= SHORTEST:
            found[window] = None
    return list(found)


def write_prompts(path: Path, texts: Iterable[str]) -> None:
    lines = (json.dumps({"prompt": text}, ensure_ascii=False) for text in texts)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def read_prompts(path: Path) -> list[str]:
    return [json.loads(line)["prompt"] for line in path.read_text(encoding="utf-8").splitlines()]


def byte_tokenizer() -> Any:
    """A tokenizer whose tokens are bytes, each its own id, and the end token: byte-level BPE without merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    bytewise = Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(BYTES)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytewise.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token=END, clean_up_tokenization_spaces=False)
