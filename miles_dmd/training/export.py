"""Export of a student as a diffusers pipeline, with scheduler and distillation.json."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from torch import Tensor

from miles_dmd.config.checkpoints import weight_files
from miles_dmd.contracts.distillation import Distillation
from miles_dmd.contracts.family import ModelFamily
from miles_dmd.files import replace_directory

WEIGHTS_NAME = "diffusion_pytorch_model{suffix}.safetensors"
SHARD_SIZE: int | str = "5GB"
"""Most of one weight file; larger networks are written in several, with an index."""


def write_student(
    directory: Path,
    buckets: Iterable[Mapping[str, Tensor]],
    *,
    family: ModelFamily,
    checkpoint: Path,
    shift: float,
    distillation: Distillation,
) -> None:
    """Write the pipeline to ``directory``; it appears whole or not at all.

    Weights keep the dtype that ``checkpoint`` stores them in; what is no parameter (position tables) comes from there.
    """
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    index = json.loads((checkpoint / "model_index.json").read_text(encoding="utf-8-sig"))
    _copy_components(partial, checkpoint, index, skip={family.network_component, "scheduler"})
    _write_network(partial / family.network_component, checkpoint / family.network_component, buckets)
    scheduler = family.code().write_scheduler(
        partial / "scheduler", checkpoint=checkpoint, shift=shift, solver=distillation.solver
    )
    index["scheduler"] = ["diffusers", scheduler]
    index.pop("_name_or_path", None)
    (partial / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    distillation.write(partial)
    replace_directory(partial, directory)  # a run that goes on has left a student there before


def _copy_components(target: Path, checkpoint: Path, index: Mapping[str, Any], *, skip: set[str]) -> None:
    """Only what model_index.json names: repositories also hold single-file checkpoints of many gigabytes."""
    for name, entry in index.items():
        if isinstance(entry, list) and entry[0] is not None and name not in skip:
            shutil.copytree(checkpoint / name, target / name)
    for path in checkpoint.glob("LICENSE*"):
        shutil.copy2(path, target / path.name)


def _write_network(target: Path, source: Path, buckets: Iterable[Mapping[str, Tensor]]) -> None:
    target.mkdir()
    shutil.copy2(source / "config.json", target / "config.json")
    stored = _stored_tensors(source)
    weights: dict[str, Tensor] = {}
    for bucket in buckets:
        for name, value in bucket.items():
            weights[name] = value.to(stored[name].dtype) if name in stored else value
    for name in stored.keys() - weights.keys():
        weights[name] = stored[name]
    save_torch_state_dict(weights, target, filename_pattern=WEIGHTS_NAME, max_shard_size=SHARD_SIZE)


class _LazyTensors(Mapping[str, Tensor]):
    """Tensors of one or more safetensors files, each read when it is asked for."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = [safe_open(str(path), "pt") for path in files]
        self._where = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118 - not a dict

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._where[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Any:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def _stored_tensors(component: Path) -> Mapping[str, Tensor]:
    return _LazyTensors(weight_files(component))
