"""Weight files of a component: their names, and the headers of their safetensors; no tensor is read."""

import json
import math
import struct
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_dmd.errors import ConfigError
from miles_dmd.inputs import exists, is_file, read_bytes
from miles_dmd.pipelines.documents import read_json, read_once, require_beside
from miles_dmd.pipelines.foreign import is_pointer, other_names, other_weights, pointer

WEIGHTS = "diffusion_pytorch_model.safetensors"
ENCODER_WEIGHTS = "model.safetensors"
_LARGEST_HEADER = 100 * 2**20
_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
_BITS |= dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8)
_BITS |= dict.fromkeys(("I16", "U16", "F16", "BF16"), 16) | dict.fromkeys(("I32", "U32", "F32"), 32)
_BITS |= dict.fromkeys(("I64", "U64", "F64", "C64"), 64)
"""dtype of safetensors -> bits of one value."""


def require_weights(directory: Path, pipeline: str) -> None:
    """Raises ConfigError unless all weight files of a component are there, and whole."""
    for path in weight_files(directory):
        if not is_file(path):
            if exists(path):
                read_bytes(path)  # which says what it is
            if why := other_weights(directory, path.name, pipeline):
                raise ConfigError(why)
            raise ConfigError(f"lacks the weights {path}; download them, or look at the run with --dry-run")
        _header(path)


def weight_files(directory: Path) -> list[Path]:
    """Weight files of one component: those that its index names, or the single file, whether or not they are there."""
    entry = weight_entry(directory)
    return [directory / name for name in weight_names(entry)] if entry.suffix == ".json" else [entry]


def weight_entry(directory: Path) -> Path:
    """Weight index of one component, or where it has none the single file, whether or not it is there.

    diffusers' components call them differently than transformers' encoders and language models.
    """
    for name in (WEIGHTS, ENCODER_WEIGHTS):
        if is_file(index := directory / f"{name}.index.json"):
            return index
    transformers_own = directory.name.startswith("text_encoder") or is_causal(directory)
    return directory / (ENCODER_WEIGHTS if transformers_own else WEIGHTS)


def is_causal(directory: Path) -> bool:
    """True if ``directory`` says that it is a language model."""
    config = directory / "config.json"
    classes = read_json(config).get("architectures") if is_file(config) else None
    return isinstance(classes, list) and any(str(name).endswith("ForCausalLM") for name in classes)


def weight_names(index: Path) -> list[str]:
    """The files that an index names, beside it. Raises ConfigError for one that leaves its directory."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ConfigError(f"{index} names no weight files")
    files = sorted(set(map(str, names.values())))
    for name in files:
        require_beside(name, index)
    return files


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


def _shapes(files: Sequence[Path]) -> dict[str, tuple[int, ...]]:
    return {name: shape for path in files for name, shape in _header(path).items()}


def _header(path: Path) -> dict[str, tuple[int, ...]]:
    """name -> shape of each tensor."""
    return {name: tuple(map(int, entry["shape"])) for name, entry in tensor_entries(path).items()}


@read_once
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
        end = 8 + length + _end(header)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror})") from error
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise damaged from error
    if size != end:
        raise damaged
    return header


def _end(header: Mapping[str, Mapping[str, Any]]) -> int:
    """Bytes of all tensors. Raises ValueError unless they follow each other without a gap, each as long as its shape
    and dtype make it, as the library has it."""
    end = 0
    for entry in sorted(header.values(), key=lambda entry: tuple(entry["data_offsets"])):
        numbers = (*entry["shape"], *entry["data_offsets"])
        if any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError(f"{numbers} are no sizes and places")
        start, stop = entry["data_offsets"]
        if start != end or math.prod(entry["shape"]) * _BITS[entry["dtype"]] != 8 * (stop - start):
            raise ValueError(f"a tensor at {start} to {stop} after {end}")
        end = stop
    if not header:
        raise ValueError("no tensors")
    return end
