"""Refusals of on-policy distillation at the door: options at odds, and models that would bias the estimator."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from miles_dmd.errors import ConfigError
from miles_dmd.inputs import MIB, is_file, parse_object, read_bytes, read_text
from miles_dmd.pipelines.documents import read_json
from miles_dmd.shown import short_repr

if TYPE_CHECKING:
    from miles_dmd.losses.resopd import Options

SAMPLES_NOTHING = "forward_kl_topk_tail"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
LARGEST_TOKENIZER = 128 * MIB


def check_options(options: Options, overrides: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises ConfigError for an option that would do nothing, or that is not what it seems."""
    for url in options.opd_teacher_url:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(f"--opd-teacher-url {url} is no address; write it as http://HOST:PORT")
    if options.opd_residual_baseline != "none" and options.opd_loss != "resopd":
        raise ConfigError(
            f"--opd-residual-baseline {options.opd_residual_baseline} is of the residual of --opd-loss resopd, and "
            f"{options.opd_loss} has none; drop it"
        )
    if options.opd_importance_cap is not None and options.opd_loss == SAMPLES_NOTHING:
        raise ConfigError(
            f"--opd-importance-cap {options.opd_importance_cap:g} weighs what is sampled, and --opd-loss "
            f"{options.opd_loss} samples nothing; drop it"
        )
    if (own := overrides.get("teacher", {}).get("hf_checkpoint")) is not None:
        raise ConfigError(
            f"--teacher-hf-checkpoint {own}: a run has one teacher, and --teacher-checkpoint names it; pass that"
        )


def check_models(student: str | None, teacher: str | None, top_k: int) -> None:
    """Raises ConfigError for models that are there and do not fit: files that are missing are others' to refuse."""
    if student is None or not is_file(Path(student) / "config.json"):
        return
    config = read_json(Path(student) / "config.json")
    _check_dropout(student, config)
    _check_head("--hf-checkpoint", student, config, top_k)
    if teacher is not None and is_file(Path(teacher) / "config.json"):
        _check_head("--teacher-checkpoint", teacher, read_json(Path(teacher) / "config.json"), top_k)
        check_tokenizers(Path(student), Path(teacher))


def _check_head(flag: str, directory: str, config: Mapping[str, Any], top_k: int) -> None:
    vocabulary = config.get("vocab_size")
    if isinstance(vocabulary, int) and top_k > vocabulary:
        raise ConfigError(
            f"--opd-top-k {top_k} is more than the vocabulary of {flag} {directory} has, {vocabulary}; name at most "
            "that, and usually 4 to 64"
        )


def _check_dropout(student: str, config: Mapping[str, Any]) -> None:
    for name, value in config.items():
        if ("dropout" in name or name.endswith("_pdrop")) and isinstance(value, int | float) and value > 0:
            raise ConfigError(
                f"--hf-checkpoint {student}: its config.json has {name} {value}, and the student that trains must be "
                "the one that sampled, without dropout; set it to 0 there"
            )


def check_tokenizers(student: Path, teacher: Path) -> None:
    """Raises ConfigError where the two would read different text in one token id. Directories without a tokenizer are
    not compared."""
    for name in TOKENIZER_FILES:
        one, other = student / name, teacher / name
        if not (is_file(one) and is_file(other)):
            continue
        if name == "tokenizer.json":
            why = _difference(_vocabulary(one), _vocabulary(other))
        else:
            same = read_bytes(one, LARGEST_TOKENIZER) == read_bytes(other, LARGEST_TOKENIZER)
            why = "" if same else f"their {name} differ"
        if why:
            raise ConfigError(
                f"--hf-checkpoint {student} and --teacher-checkpoint {teacher} have different tokenizers, so that the "
                f"teacher would score other text than was sampled: {why}; choose a teacher of the student's tokenizer"
            )
        return  # the first that both have is what both are read from


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
