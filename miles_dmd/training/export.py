"""Export of a student as a diffusers pipeline, with scheduler and distillation.json."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError, safe_open
from torch import Tensor

from miles_dmd.contracts.distillation import Distillation
from miles_dmd.contracts.family import ModelFamily
from miles_dmd.contracts.model_card import CARD_NAME, model_card
from miles_dmd.contracts.reports import ExportReport
from miles_dmd.errors import SaveError
from miles_dmd.files import copy_tree, remove_tree, replace_directory
from miles_dmd.pipelines.documents import read_json
from miles_dmd.pipelines.weights import weight_files
from miles_dmd.training.buckets import BUCKET_BYTES, pack
from miles_dmd.training.rounding import Asked, rounded

WEIGHTS_NAME = "diffusion_pytorch_model{suffix}.safetensors"
SHARD_SIZE: int | str = "5GB"
"""Most of one weight file; larger networks are written in several, with an index."""


def write_student(
    directory: Path,
    buckets: Iterable[Mapping[str, Tensor]],
    *,
    family: ModelFamily,
    start: Path,
    shift: float,
    distillation: Distillation,
    dtype: Asked = "auto",
) -> ExportReport:
    """Write the pipeline to ``directory``; it appears whole or not at all. Raises SaveError.

    ``buckets`` hold its parameters in fp32, which are rounded to ``dtype``; what is no parameter (position tables)
    comes from ``start``, the pipeline directory from which the student started.
    """
    partial = directory.with_name(directory.name + ".partial")
    try:
        remove_tree(partial)
        partial.mkdir(parents=True)
        report = _write_parts(partial, buckets, family, start, shift, distillation, dtype)
        replace_directory(partial, directory)  # a run that goes on has left a student there before
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):  # what fills the disk may be a half of it
            remove_tree(partial)
        raise SaveError(f"the student could not be written to {directory}: {_reason(error)}") from error
    return report


def _write_parts(
    partial: Path,
    buckets: Iterable[Mapping[str, Tensor]],
    family: ModelFamily,
    start: Path,
    shift: float,
    distillation: Distillation,
    dtype: Asked,
) -> ExportReport:
    index = dict(read_json(start / "model_index.json"))
    _copy_components(partial, start, index, skip={family.network_component, "scheduler"})
    report = _write_network(partial / family.network_component, start / family.network_component, buckets, dtype)
    scheduler = family.code().write_scheduler(
        partial / "scheduler", directory=start, shift=shift, solver=distillation.solver
    )
    index["scheduler"] = ["diffusers", scheduler]
    index.pop("_name_or_path", None)
    (partial / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    described = replace(distillation, weights=report)
    described.write(partial)
    (partial / CARD_NAME).write_text(model_card(family.pipeline, described), encoding="utf-8")
    return report


def _copy_components(target: Path, source: Path, index: Mapping[str, Any], *, skip: set[str]) -> None:
    """Copy what model_index.json names, and no more: repositories also hold single files of many gigabytes."""
    for name, entry in index.items():
        if isinstance(entry, list) and entry[0] is not None and name not in skip:
            copy_tree(source / name, target / name)
    for path in source.glob("LICENSE*"):
        shutil.copyfile(path, target / path.name)


def _write_network(target: Path, source: Path, buckets: Iterable[Mapping[str, Tensor]], dtype: Asked) -> ExportReport:
    target.mkdir()
    shutil.copyfile(source / "config.json", target / "config.json")
    stored = LazyTensors(weight_files(source))
    average = {name: value for bucket in buckets for name, value in bucket.items()}
    weights, report = rounded(average, stored, dtype)
    for name in stored.keys() - weights.keys():
        weights[name] = stored[name]
    save_torch_state_dict(weights, target, filename_pattern=WEIGHTS_NAME, max_shard_size=SHARD_SIZE)
    mode = (target / "config.json").stat().st_mode & 0o777
    for path in target.glob("*.safetensors"):
        path.chmod(mode)  # safetensors writes for the owner alone, whatever the umask allows
    return report


def exported_buckets(component: Path, buffers: Collection[str]) -> Iterator[dict[str, Tensor]]:
    """The parameters of an exported network in fp32, a bucket in memory at a time; its file holds ``buffers`` too."""
    stored = LazyTensors(weight_files(component))
    for names in pack({name: 4 * stored.numel(name) for name in stored if name not in buffers}, BUCKET_BYTES):
        yield {name: stored[name].float() for name in names}


def _reason(error: Exception) -> str:
    """Reason alone; safetensors says it with the operation in front."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


class LazyTensors(Mapping[str, Tensor]):
    """Tensors of one or more safetensors files, each read when it is asked for."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = [safe_open(str(path), "pt") for path in files]
        self._where = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118 - not a dict

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._where[name].get_tensor(name)
        return tensor

    def numel(self, name: str) -> int:
        """Its elements; nothing but the file's header is read."""
        return math.prod(self._where[name].get_slice(name).get_shape())

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)
