"""Directories of causal language models as transformers writes them: config, weights, tokenizer. Knows no torch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles_dmd.errors import ConfigError
from miles_dmd.files import digest_file
from miles_dmd.inputs import MIB, exists, is_file, is_folder, parse_object, read_text
from miles_dmd.pipelines.directory import VOCABULARIES, require_tokenizer
from miles_dmd.pipelines.documents import read_json
from miles_dmd.pipelines.quantised import refuse_quantised
from miles_dmd.pipelines.weights import require_weights, stored_tensors, weight_files
from miles_dmd.shown import short_repr

CLASS = "ForCausalLM"
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
"""Ends of the name of the table that has a row for each token."""
LARGEST_TOKENIZER = 128 * MIB
SETTINGS = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
DROPOUTS = ("dropout", "_pdrop")


def require_model(directory: Path, *, weights: bool) -> None:
    """Raises ConfigError unless ``directory`` is a whole causal language model, with its ``weights`` if asked."""
    if exists(directory / "model_index.json"):
        raise ConfigError("is a diffusers pipeline, and a language model is asked for; name a transformers directory")
    if not is_folder(directory) or not is_file(directory / "config.json"):
        raise ConfigError(
            "is no directory with a config.json; name one that holds a language model, such as `hf download REPOSITORY "
            "--local-dir DIR` makes"
        )
    config = read_json(directory / "config.json")
    _require_stock(directory, config)
    refuse_quantised(directory, [""])
    if weights or not lacking(directory):
        require_weights(directory, "causal language model")
        require_tokenizer(directory)
    _require_embeddings(directory, config)


def _require_stock(directory: Path, config: Mapping[str, Any]) -> None:
    """A model of transformers itself: code that comes with a directory is not run."""
    classes = config.get("architectures")
    if not isinstance(classes, list) or not any(str(name).endswith(CLASS) for name in classes):
        raise ConfigError(
            f"{directory / 'config.json'}: architectures {short_repr(classes)} names no class that ends in {CLASS}; "
            "name a causal language model"
        )
    for name in ("config.json", "tokenizer_config.json"):
        if is_file(path := directory / name) and "auto_map" in read_json(path):
            raise ConfigError(f"{path} names code of its own (auto_map), which is not run; name a model without")
    for name, value in config.items():
        if any(word in name for word in DROPOUTS) and isinstance(value, int | float) and value > 0:
            raise ConfigError(
                f"{directory / 'config.json'}: {name} {value:g} must be 0, since the student that trains must be the "
                "one that sampled; set it there"
            )


def _require_embeddings(directory: Path, config: Mapping[str, Any]) -> None:
    size = vocabulary_size(directory)
    for name, shape in (stored_tensors(directory) or {}).items():
        if name.endswith(EMBEDDINGS) and (len(shape) != 2 or shape[0] != size):
            raise ConfigError(
                f"the weights in {directory} have {name} of shape {list(shape)}, and its config.json a vocab_size of "
                f"{size}; download both again from one place"
            )


def vocabulary_size(directory: Path) -> int:
    """Token ids that the network has logits of."""
    size = read_json(directory / "config.json").get("vocab_size")
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigError(f"{directory / 'config.json'}: vocab_size {short_repr(size)} must be a positive whole number")
    return size


def max_positions(directory: Path) -> int | None:
    """Positions that the network was made for; None where its config.json says nothing of it."""
    config = read_json(directory / "config.json")
    found = config.get("max_position_embeddings", config.get("n_positions"))
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def lacking(directory: Path) -> list[str]:
    """Parts of a directory of which only the configuration is there."""
    parts = {
        "weights": all(map(is_file, weight_files(directory))),
        "tokenizer": any(is_file(directory / name) for name in VOCABULARIES),
    }
    return [name for name, there in parts.items() if not there]


def identity(directory: Path, known: Path | None = None) -> str:
    """Hexadecimal SHA-256 over configuration, tokenizer and weights; the folder ``known`` remembers those of large
    files."""
    digest = hashlib.sha256()
    named = [directory / name for name in (*SETTINGS, *VOCABULARIES)]
    for path in (*named, *weight_files(directory)):
        if is_file(path):
            digest.update(os.fsencode(path.name))
            digest_file(digest, path, known)
    return digest.hexdigest()


def require_one_vocabulary(directory: Path, other_flag: str, other: Path) -> None:
    """Raises ConfigError where two models would read different text in one token id."""
    for name in VOCABULARIES:
        one, there = directory / name, other / name
        if not (is_file(one) and is_file(there)):
            continue
        if name == "tokenizer.json":
            why = _difference(_vocabulary(one), _vocabulary(there))
        else:
            why = "" if _digest(one) == _digest(there) else f"their {name} differ"
        if why:
            raise ConfigError(
                f"its tokenizer is not that of {other_flag} {other}, so that the teacher would score other text than "
                f"was sampled: {why}; choose a teacher of the student's tokenizer"
            )
        return  # the first that both have is what both are read from


def _digest(path: Path) -> bytes:
    digest = hashlib.sha256()
    digest_file(digest, path)
    return digest.digest()


def _vocabulary(path: Path) -> Mapping[str, int]:
    """token -> id, with the added tokens."""
    try:
        content = parse_object(read_text(path, LARGEST_TOKENIZER))
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} cannot be used: {error}; download it again") from error
    model, added = content.get("model"), content.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    # unigram models list [piece, score] in the order of ids
    pairs = vocab.items() if isinstance(vocab, dict) else ((str(row[0]), i) for i, row in enumerate(vocab or ()))
    return {**dict(pairs), **{row["content"]: row["id"] for row in added or ()}}


def _difference(one: Mapping[str, int], other: Mapping[str, int]) -> str:
    """The first token, by its id, that is not the same in both; empty where there is none."""
    if one == other:
        return ""
    both = sorted({**other, **one}.items(), key=lambda row: row[1])
    token = next(token for token, _ in both if one.get(token) != other.get(token))
    ids = " and ".join("no id" if i is None else f"id {i}" for i in (one.get(token), other.get(token)))
    return f"token {short_repr(token)} has {ids}"
