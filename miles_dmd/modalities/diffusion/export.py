"""Export of a student as a diffusers pipeline, with scheduler and distillation.json."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from miles_dmd.contracts.reports import ExportReport
from miles_dmd.files import copy_tree
from miles_dmd.modalities.diffusion.distillation import Distillation
from miles_dmd.modalities.diffusion.family import DiffusionFamily
from miles_dmd.modalities.diffusion.model_card import CARD_NAME, model_card
from miles_dmd.pipelines.documents import read_json
from miles_dmd.training.export import write_network, write_student
from miles_dmd.training.rounding import Asked

WEIGHTS_NAME = "diffusion_pytorch_model{suffix}.safetensors"


def write_pipeline(
    directory: Path,
    buckets: Iterable[Mapping[str, Tensor]],
    *,
    family: DiffusionFamily,
    start: Path,
    shift: float,
    distillation: Distillation,
    dtype: Asked = "auto",
) -> ExportReport:
    """Write the pipeline to ``directory``; it appears whole or not at all. Raises SaveError.

    ``buckets`` hold its parameters in fp32, which are rounded to ``dtype``; what is no parameter (position tables)
    comes from ``start``, the pipeline directory from which the student started.
    """
    return write_student(
        directory, lambda partial: _write_parts(partial, buckets, family, start, shift, distillation, dtype)
    )


def _write_parts(
    partial: Path,
    buckets: Iterable[Mapping[str, Tensor]],
    family: DiffusionFamily,
    start: Path,
    shift: float,
    distillation: Distillation,
    dtype: Asked,
) -> ExportReport:
    index = dict(read_json(start / "model_index.json"))
    _copy_components(partial, start, index, skip={family.network_component, "scheduler"})
    report = write_network(
        partial / family.network_component, start / family.network_component, buckets, dtype, WEIGHTS_NAME
    )
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
