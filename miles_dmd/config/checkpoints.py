"""What a pipeline directory says of itself in its JSON files and safetensors headers; no tensor is read."""

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from miles_dmd.config.values import checked, kinds
from miles_dmd.errors import ConfigError
from miles_dmd.files import digest_file
from miles_dmd.inputs import MIB, is_file, is_folder, parse_json, read_text
from miles_dmd.shown import shown

C = TypeVar("C")

WEIGHTS = "diffusion_pytorch_model.safetensors"
ENCODER_WEIGHTS = "model.safetensors"
NOT_PARAMETERS = ("pos_embed.pos_embed",)
"""The sine table of diffusers' PatchEmbed: a buffer that is saved beside the parameters (226 M numbers in SD3.5)."""
LARGEST = 4 * MIB
"""Of a component's configuration, or of the index of its weights."""
_LARGEST_HEADER = 100 * 2**20
_CONFIGS = ("config.json", "scheduler_config.json", "tokenizer_config.json", "preprocessor_config.json")


def read_json(path: Path) -> dict[str, Any]:
    """Raises ConfigError where there is no such file, or where it holds no JSON object."""
    text = read_text(path, LARGEST)
    try:
        value = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{path} cannot be used: {error}; download it again") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, not a {type(value).__name__}; download it again")
    return value


def read_config(kind: type[C], path: Path) -> C:
    """``from_config`` of a file."""
    return from_config(kind, read_json(path), str(path))


def from_config(kind: type[C], content: Mapping[str, Any], where: str) -> C:
    """The fields of the dataclass ``kind`` out of a component's configuration, which has others that nobody here reads.

    Raises ConfigError for a value of another type, or out of its bounds: ``{where}: patch_size 'two' must be ...``.
    """
    values = {}
    for name, of in kinds(kind).items():
        if name not in content:
            continue
        value, label = content[name], f"{where}: {name}"
        if isinstance(value, str) and of.type is not str:
            raise ConfigError(f"{label} {shown(value)} must be {of}; download it again")
        values[name] = checked(of, value, label)
    return kind(**values)


def require_pipeline(directory: Path, pipeline: str, components: Mapping[str, Sequence[str]]) -> None:
    """Raises ConfigError unless ``directory`` is a pipeline of that class with all ``components``, of their classes."""
    if not is_folder(directory):
        raise ConfigError(f"is no directory; download one: hf download REPOSITORY --local-dir {directory}")
    if not is_file(directory / "model_index.json"):
        raise ConfigError(
            "is not a diffusers pipeline (no model_index.json); name the folder that save_pretrained wrote"
        )
    index = read_json(directory / "model_index.json")
    if index.get("_class_name") != pipeline:
        raise ConfigError(
            f"is a {shown(index.get('_class_name'))}, not a {pipeline}; name one, or another --model-family"
        )
    for name, entry in index.items():
        if isinstance(entry, list):
            _require_inside(name, directory / "model_index.json")
            for weights in sorted((directory / name).glob("*.index.json")):
                weight_names(weights)
    for name, classes in components.items():
        entry = index.get(name)
        if not isinstance(entry, list) or not entry or entry[0] is None:
            raise ConfigError(f"lacks the component {name} (model_index.json); name a complete {pipeline}")
        if entry[-1] not in classes:
            raise ConfigError(
                f"has a {shown(entry[-1])} as {name} (model_index.json), and needs {' or '.join(classes)}"
            )
    for name in (name for name, entry in index.items() if isinstance(entry, list) and entry and entry[0] is not None):
        if not any(is_file(directory / name / config) for config in _CONFIGS):
            raise ConfigError(f"lacks the component {name} ({directory / name} has no config); download it completely")


def require_weights(directory: Path) -> None:
    """Raises ConfigError unless all weight files of a component are there, and whole."""
    for path in weight_files(directory):
        if not is_file(path):
            raise ConfigError(f"lacks the weights {path}; download them, or look at the run with --dry-run")
        _header(path)


def weight_files(directory: Path) -> list[Path]:
    """Of one component: those that its index names, or the single file, whether or not they are there."""
    entry = weight_entry(directory)
    return [directory / name for name in weight_names(entry)] if entry.suffix == ".json" else [entry]


def weight_entry(directory: Path) -> Path:
    """Of one component: the index of its weights, or where it has none the single file, whether or not it is there.

    diffusers' components and transformers' encoders call them differently.
    """
    for name in (WEIGHTS, ENCODER_WEIGHTS):
        if is_file(index := directory / f"{name}.index.json"):
            return index
    return directory / (ENCODER_WEIGHTS if directory.name.startswith("text_encoder") else WEIGHTS)


def weight_names(index: Path) -> list[str]:
    """The files that an index names, beside it. Raises ConfigError for one that leaves its directory."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ConfigError(f"{index} names no weight files")
    files = sorted(set(map(str, names.values())))
    for name in files:
        _require_inside(name, index)
    return files


def _require_inside(name: str, document: Path) -> None:
    if name in ("", ".", "..") or "/" in name or "\\" in name:
        raise ConfigError(f"{document} names {shown(name)}, which is not beside it; it is not read")


def safetensors_parameters(directory: Path) -> int | None:
    """Number of parameters of a component, from the headers of its files; None where they are not all there."""
    files = weight_files(directory)
    if not all(map(is_file, files)):
        return None
    return sum(math.prod(shape) for name, shape in _shapes(files).items() if name not in NOT_PARAMETERS)


def require_tensors(directory: Path, marks: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ConfigError unless a component's weights, where they are there, have these tensors of these shapes."""
    files = weight_files(directory)
    found = _shapes(files) if all(map(is_file, files)) else dict(marks)
    for name, shape in marks.items():
        if found.get(name) != shape:
            there = f"{name} of shape {list(found[name])}" if name in found else f"no {name}"
            raise ConfigError(
                f"the weights in {directory} have {there}, and its config.json describes one of shape {list(shape)}; "
                "download both again from one place"
            )


def require_tokenizer(directory: Path) -> None:
    """Raises ConfigError unless a tokenizer has its words: without them transformers makes one that knows none."""
    if is_file(path := directory / "tokenizer.json"):
        try:
            json.loads(read_text(path))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is no JSON ({error}); download it again") from error
        return
    names = ["spiece.model", "vocab.json", "merges.txt"]
    spiece, vocabulary, merges = (is_file(directory / name) for name in names)
    if not spiece and not (vocabulary and merges):
        raise ConfigError(
            f"{directory} has neither tokenizer.json nor spiece.model nor vocab.json with merges.txt; download it "
            "completely"
        )


def _shapes(files: Sequence[Path]) -> dict[str, tuple[int, ...]]:
    return {name: shape for path in files for name, shape in _header(path).items()}


def _header(path: Path) -> dict[str, tuple[int, ...]]:
    """name -> shape of each tensor."""
    return {name: tuple(map(int, entry["shape"])) for name, entry in tensor_entries(path).items()}


def tensor_entries(path: Path) -> dict[str, dict[str, Any]]:
    """name -> dtype, shape and place of each tensor of a safetensors file. Raises ConfigError unless it is whole.

    It starts with the length of its JSON header: u64, little end.
    """
    damaged = ConfigError(f"{path} is no safetensors file, or not all of it; download it again")
    try:
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= _LARGEST_HEADER:
                raise damaged
            header: dict[str, dict[str, Any]] = json.loads(file.read(length))
            size = path.stat().st_size
        header.pop("__metadata__", None)
        for entry in header.values():
            tuple(map(int, entry["shape"]))
        end = 8 + length + max(int(entry["data_offsets"][1]) for entry in header.values())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror})") from error
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise damaged from error
    if size != end:
        raise damaged
    return header


def encoder_fingerprint(components: Iterable[str], directory: Path, known: Path | None = None) -> str:
    """SHA-256 over everything of a pipeline that turns text into embeddings, tokenizers' and encoders' files; the
    folder ``known`` remembers those of large ones."""
    digest = hashlib.sha256()
    for component in components:
        if not component.startswith(("text_encoder", "tokenizer")):
            continue
        for path in sorted((directory / component).rglob("*")):
            if path.is_file():
                digest.update(str(path.relative_to(directory)).encode())
                digest_file(digest, path, known)
    return digest.hexdigest()
