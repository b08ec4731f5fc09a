"""Counts of texts that are longer than their encoders read, for families whose pipelines tokenize a prompt as it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from miles_dmd.modalities.diffusion.family import Truncation

PIECE = 1000
"""Texts that are tokenized in one call."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what the libraries say of each text that is cut, with the text (we say it in one line), and of image
    processors that nobody here needs."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    before = diffusers_logging.get_verbosity(), transformers_logging.get_verbosity()
    for logging in (diffusers_logging, transformers_logging):
        logging.disable_progress_bar()
        logging.set_verbosity_error()
    try:
        yield
    finally:
        diffusers_logging.set_verbosity(before[0])
        transformers_logging.set_verbosity(before[1])


def truncations(directory: Path, texts: Sequence[str], limits: Mapping[str, int]) -> list[Truncation]:
    """One for each of ``limits``: the ending of the folders tokenizer and text_encoder ("", "_2") -> tokens read."""
    with quiet():
        from transformers import AutoTokenizer

        found = []
        for ending, limit in limits.items():
            tokenizer = AutoTokenizer.from_pretrained(str(directory / f"tokenizer{ending}"), local_files_only=True)
            pieces = (list(texts[start : start + PIECE]) for start in range(0, len(texts), PIECE))
            lengths = [len(ids) for piece in pieces for ids in tokenizer(piece).input_ids]
            longer = sum(length > limit for length in lengths)
            found.append(Truncation(f"text_encoder{ending}", limit, longer, max(lengths)))
    return found
