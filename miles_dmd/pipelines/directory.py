"""Pipeline directories: JSON files and safetensors headers; no tensor is read."""

import hashlib
import json
import math
import os
import re
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from miles_dmd.config.values import checked, kinds
from miles_dmd.errors import ConfigError
from miles_dmd.files import digest_file
from miles_dmd.inputs import MIB, exists, is_file, is_folder, parse_json, read_text
from miles_dmd.pipelines.foreign import is_pointer, no_pipeline, other_names, other_weights, pointer
from miles_dmd.shown import shown

C = TypeVar("C")

WEIGHTS = "diffusion_pytorch_model.safetensors"
ENCODER_WEIGHTS = "model.safetensors"
VOCABULARIES = ("tokenizer.json", "spiece.model", "vocab.json", "merges.txt")
"""A tokenizer's words: the first, or the second, or the other two."""
LARGEST = 4 * MIB
"""Of a component's configuration, or of the index of its weights."""
_REPOSITORY = re.compile(r"(https:/+huggingface\.co/)?(?P<owner>[A-Za-z0-9][\w-]*)/(?P<name>[A-Za-z0-9][\w.-]*)")
_LARGEST_HEADER = 100 * 2**20
_LIBRARIES = ("diffusers", "transformers")
_CONFIGS = ("config.json", "scheduler_config.json", "tokenizer_config.json", "preprocessor_config.json")


def read_json(path: Path) -> dict[str, Any]:
    """Raises ConfigError where there is no such file, or where it holds no JSON object."""
    text = read_text(path, LARGEST)
    try:
        value = parse_json(text)
    except ValueError as error:
        if is_pointer(path):
            raise ConfigError(pointer(path)) from None
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
    if exists(directory) and not is_file(directory / "model_index.json"):
        raise ConfigError(no_pipeline(directory, pipeline))
    if not is_folder(directory):
        raise ConfigError(f"is no directory{_download(str(directory))}")
    index = read_json(directory / "model_index.json")
    if index.get("_class_name") != pipeline:
        raise ConfigError(
            f"is a {shown(index.get('_class_name'))}, not a {pipeline}; name one, or another --model-family"
        )
    for name, entry in index.items():
        if isinstance(entry, list):
            _require_inside(name, directory / "model_index.json")
            _require_stock(name, entry, directory)
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


def _download(name: str) -> str:
    """What to do instead of naming a directory that is not there; a name on the hub is not one."""
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
            f"model_index.json takes {name} from the library {shown(entry[0])}, and only {' and '.join(_LIBRARIES)} "
            "are used; name a pipeline without code of its own"
        )
    for path in (directory / name / config for config in _CONFIGS):
        if is_file(path) and "auto_map" in read_json(path):
            raise ConfigError(
                f"{path} names code of its own (auto_map), which is not run, and which a student would carry; take it "
                "out, or name a pipeline without"
            )


def require_weights(directory: Path, pipeline: str) -> None:
    """Raises ConfigError unless all weight files of a component are there, and whole."""
    for path in weight_files(directory):
        if not is_file(path):
            if why := other_weights(directory, path.name, pipeline):
                raise ConfigError(why)
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


def safetensors_parameters(directory: Path, buffers: Collection[str] = ()) -> int | None:
    """Number of parameters of a component, from the headers of its files, which hold ``buffers`` beside them; None
    where they are not all there."""
    found = stored_tensors(directory)
    if found is None:
        return None
    return sum(math.prod(shape) for name, shape in found.items() if name not in buffers)


def stored_tensors(directory: Path) -> dict[str, tuple[int, ...]] | None:
    """Name -> shape of a component's tensors, from the headers of its files; None where they are not all there."""
    files = weight_files(directory)
    return _shapes(files) if all(map(is_file, files)) else None


def require_tensors(
    directory: Path, wanted: Mapping[str, tuple[int, ...]], *, buffers: Collection[str] | None = None
) -> None:
    """Raises ConfigError unless a component's weights, where they are there, have these tensors of these shapes, and
    beside them none but ``buffers``, where these are given."""
    found = stored_tensors(directory)
    if found is None:
        return
    faults = [
        f"{name} of shape {list(found[name])}" if name in found else f"no {name}"
        for name, shape in wanted.items()
        if found.get(name) != shape
    ]
    if buffers is not None:
        faults += [name for name in found if name not in wanted and name not in buffers]
    if not faults:
        return
    if why := other_names(found, wanted):
        raise ConfigError(f"the weights in {directory} are not stored under their names: {why}")
    more = f" ({len(faults) - 1:,} more of {len(wanted):,} differ)" if len(faults) > 1 else ""
    raise ConfigError(
        f"the weights in {directory} have {faults[0]}{more}, and its config.json describes another network: download "
        "both again from one place"
    )


def require_tokenizer(directory: Path) -> None:
    """Raises ConfigError unless a tokenizer has its words: without them transformers makes one that knows none."""
    for path in (directory / name for name in VOCABULARIES):
        if is_pointer(path):
            raise ConfigError(pointer(path))
    if is_file(path := directory / VOCABULARIES[0]):
        try:
            json.loads(read_text(path))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is no JSON ({error}); download it again") from error
        return
    spiece, vocabulary, merges = (is_file(directory / name) for name in VOCABULARIES[1:])
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
    if is_pointer(path):
        raise ConfigError(pointer(path))
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
                digest.update(os.fsencode(path.relative_to(directory)))
                digest_file(digest, path, known)
    return digest.hexdigest()
