"""Record of an exported student: what it was distilled from, how far, in which dtype. Knows no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from miles_dmd.contracts.reports import ExportReport
from miles_dmd.shown import printable

HUB_FOLDER = "models--"
"""huggingface_hub keeps ORG/NAME in models--ORG--NAME/snapshots/REVISION."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudentRecord:
    """What every modality writes beside a student; each adds how the student is called."""

    teacher: str
    """Name of the teacher's directory; never a path of the machine that it was distilled on."""
    policy_version: int
    """Updates that the student has had."""
    teacher_sha256: str = ""
    """Fingerprint of the teacher's files; empty where nobody computed it."""
    weights: ExportReport | None = None
    """The dtype of the student's weights; None until they are written."""


def teacher_name(directory: str | Path) -> str:
    """Name of a model: the hub's where it lies in the hub's cache, else its directory's."""
    path = Path(os.path.abspath(directory))
    cached = next((part for part in path.parts if part.startswith(HUB_FOLDER)), "")
    return printable(cached.removeprefix(HUB_FOLDER).replace("--", "/") or path.name)
