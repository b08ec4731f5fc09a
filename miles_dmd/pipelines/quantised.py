"""Refusal of weights that are stored in 8 bits, as integers, or quantised: training starts from all of their bits."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from miles_dmd.errors import ConfigError
from miles_dmd.inputs import is_file
from miles_dmd.pipelines.documents import read_json
from miles_dmd.pipelines.weights import tensor_entries, weight_files
from miles_dmd.shown import short_repr

NARROW = ("F8", "F6_", "F4", "I8", "U8")
"""Prefixes of safetensors' dtypes of at most 8 bits: F8_E4M3, F8_E5M2, F8_E8M0, F6_E2M3, F4, I8, U8."""
WHOLE = ("I16", "U16", "I32", "U32", "I64", "U64", "BOOL")
POSITIONS = ("position_ids", "num_batches_tracked")
"""Ends of the names of tensors that hold no weights: older files of CLIP keep a table of positions."""
CURE = "training needs 16 or 32 bits a weight, so name a directory of the original weights"


def refuse_quantised(directory: Path, components: Iterable[str]) -> None:
    """Raises ConfigError, naming the component, from its config.json and the headers of those weights that are there.

    Not of the network alone: an encoder of 8 bits gives other embeddings, and is copied into the student.
    """
    for name_of_it in components:
        folder, component = directory / name_of_it, name_of_it or "the model"
        if is_file(path := folder / "config.json") and (how := read_json(path).get("quantization_config")) is not None:
            method = how.get("quant_method") if isinstance(how, dict) else how
            raise ConfigError(
                f"{component} is quantised ({path} has a quantization_config: {short_repr(method)}); {CURE}"
            )
        for path in filter(is_file, weight_files(folder)):
            for name, entry in tensor_entries(path).items():
                if str(entry.get("dtype")).startswith(NARROW):
                    raise ConfigError(
                        f"{component} is stored in 8 bits or fewer ({short_repr(name)} of {path} is {entry['dtype']}); "
                        f"{CURE}"
                    )
                if entry.get("dtype") in WHOLE and not name.endswith(POSITIONS):
                    raise ConfigError(
                        f"{component} is stored in whole numbers ({short_repr(name)} of {path} is {entry['dtype']}); "
                        f"{CURE}"
                    )
