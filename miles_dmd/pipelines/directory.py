"""Pipeline directories: model_index.json, the components that it names, and their tokenizers."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_dmd.errors import ConfigError
from miles_dmd.inputs import exists, is_file, is_folder, read_text
from miles_dmd.pipelines.documents import read_json, require_beside
from miles_dmd.pipelines.foreign import is_pointer, no_pipeline, pointer
from miles_dmd.pipelines.weights import weight_names
from miles_dmd.shown import short_repr

VOCABULARIES = ("tokenizer.json", "spiece.model", "vocab.json", "merges.txt")
"""A tokenizer's words: the first, or the second, or the other two."""
_REPOSITORY = re.compile(r"(https:/+huggingface\.co/)?(?P<owner>[A-Za-z0-9][\w-]*)/(?P<name>[A-Za-z0-9][\w.-]*)")
_LIBRARIES = ("diffusers", "transformers")
_ANY_TOKENIZER = ("PreTrainedTokenizer", "TokenizersBackend", "PythonBackend")
"""Classes that tell nothing of the words."""
_CONFIGS = ("config.json", "scheduler_config.json", "tokenizer_config.json", "preprocessor_config.json")


def require_pipeline(directory: Path, pipeline: str, components: Mapping[str, Sequence[str]]) -> None:
    """Raises ConfigError unless ``directory`` is a pipeline of that class with all ``components``, of their classes."""
    if exists(directory) and not exists(directory / "model_index.json"):
        raise ConfigError(no_pipeline(directory, pipeline))
    if not is_folder(directory):
        raise ConfigError(f"is no directory{_download(str(directory))}")
    index = read_json(directory / "model_index.json")
    if index.get("_class_name") != pipeline:
        raise ConfigError(
            f"is a {short_repr(index.get('_class_name'))}, not a {pipeline}; name one, or another --model-family"
        )
    for name, entry in index.items():
        if isinstance(entry, list):
            require_beside(name, directory / "model_index.json")
            _require_stock(name, entry, directory)
            for weights in sorted((directory / name).glob("*.index.json")):
                weight_names(weights)
    for name, classes in components.items():
        entry = index.get(name)
        if not isinstance(entry, list) or not entry or entry[0] is None:
            raise ConfigError(f"lacks the component {name} (model_index.json); name a complete {pipeline}")
        if entry[-1] not in classes:
            raise ConfigError(
                f"has a {short_repr(entry[-1])} as {name} (model_index.json), and needs {' or '.join(classes)}"
            )
    for name in (name for name, entry in index.items() if isinstance(entry, list) and entry and entry[0] is not None):
        if not any(is_file(directory / name / config) for config in _CONFIGS):
            raise ConfigError(f"lacks the component {name} ({directory / name} has no config); download it completely")


def _download(name: str) -> str:
    """Hint for a directory that is not there: the command that downloads it; a name on the hub is not one."""
    parent = Path(name).parent
    if parent != Path() and is_folder(parent):
        return f" ({parent} is there, and has no {Path(name).name}); name the folder that holds model_index.json"
    if (found := _REPOSITORY.fullmatch(name)) is None:
        return "; name one that holds a pipeline, such as `hf download REPOSITORY --local-dir DIR` makes"
    folder = found["name"]
    command = f"hf download {found['owner']}/{folder} --local-dir {folder}"
    return f", and nothing is fetched from the hub while a run starts: {command}, and name {folder}"


def _require_stock(name: str, entry: Sequence[Any], directory: Path) -> None:
    """Raises ConfigError for a component that needs code of its own: nobody here runs it, and a student would carry on
    naming it."""
    if entry and entry[0] not in (None, *_LIBRARIES):
        raise ConfigError(
            f"model_index.json takes {name} from the library {short_repr(entry[0])}, "
            f"and only {' and '.join(_LIBRARIES)} are used; name a pipeline without code of its own"
        )
    for path in (directory / name / config for config in _CONFIGS):
        if is_file(path) and "auto_map" in read_json(path):
            raise ConfigError(
                f"{path} names code of its own (auto_map), which is not run, and which a student would carry; take it "
                "out, or name a pipeline without"
            )


def require_tokenizer(directory: Path) -> None:
    """Raises ConfigError unless a tokenizer has its words: without them transformers makes one that knows none."""
    for path in (directory / name for name in VOCABULARIES):
        if is_pointer(path):
            raise ConfigError(pointer(path))
    if is_file(path := directory / VOCABULARIES[0]):
        try:
            words = json.loads(read_text(path))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is no JSON ({error}); download it again") from error
        _require_words_of(path, words)
        return
    spiece, vocabulary, merges = (is_file(directory / name) for name in VOCABULARIES[1:])
    if not spiece and not (vocabulary and merges):
        raise ConfigError(
            f"{directory} has neither tokenizer.json nor spiece.model nor vocab.json with merges.txt; download it "
            "completely"
        )


def _require_words_of(path: Path, words: Any) -> None:
    """Raises ConfigError where the encoder beside a tokenizer has no embedding of one of its words."""
    encoder = path.parent.with_name(path.parent.name.replace("tokenizer", "text_encoder")) / "config.json"
    size = read_json(encoder).get("vocab_size") if is_file(encoder) else None
    model = words.get("model") if isinstance(words, dict) else None
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, (dict, list)) or not vocabulary:
        raise ConfigError(f"{path} has no vocabulary; download it again")
    if isinstance(size, int) and len(vocabulary) > size:
        raise ConfigError(
            f"{path} has {len(vocabulary):,} words, and {encoder} a vocab_size of {size:,}: they do not belong "
            "together; download both again from one place"
        )


def require_tokenizer_class(directory: Path, entry: Sequence[Any]) -> None:
    """Raises ConfigError where tokenizer_config.json is of another class than ``entry`` of model_index.json."""
    path = directory / "tokenizer_config.json"
    found = read_json(path).get("tokenizer_class") if is_file(path) else None
    wanted = str(entry[-1])
    if isinstance(found, str) and (plain := found.removesuffix("Fast")) not in (
        wanted.removesuffix("Fast"),
        *_ANY_TOKENIZER,
    ):
        raise ConfigError(
            f"{path}: tokenizer_class {short_repr(plain)} is not the {wanted} that model_index.json names; "
            "the folder is another tokenizer's, so download it again"
        )
