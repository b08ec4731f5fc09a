"""distillation.json: sampling settings of an exported student and of its teacher. Knows no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from miles_dmd.contracts.reports import ExportReport
from miles_dmd.contracts.student import StudentRecord
from miles_dmd.errors import FormatError
from miles_dmd.inputs import is_file, parse_object, read_text
from miles_dmd.shown import printable, short_repr
from miles_dmd.validators import a, count, each, fields, number, optional, string

FORMAT = 1
FILE_NAME = "distillation.json"
REPORT = fields({"dtype": string, "change_kept": number, "stored_dtype": string, "stored_change_kept": number})
FIELDS = {
    "format": count,
    "sigmas": each(number),
    "solver": string,
    "teacher": string,
    "policy_version": count,
    "student_call": a(dict),
    "teacher_call": a(dict),
    "teacher_sha256": string,
    "weights": optional(REPORT),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Distillation(StudentRecord):
    """``student_call`` and ``teacher_call`` are keyword arguments: ``pipeline(prompt, **call)`` samples rightly."""

    sigmas: tuple[float, ...]
    """The grid that the network sees, e.g. 1, 0.9, 0.75, 0.5; the last step goes to 0."""
    solver: str
    student_call: Mapping[str, Any]
    teacher_call: Mapping[str, Any]

    def write(self, directory: Path) -> None:
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=2, sort_keys=False)
        (directory / FILE_NAME).write_text(text + "\n", encoding="utf-8")


def read_distillation(directory: Path) -> Distillation:
    """Raises FormatError, in one line, for a file that is missing, broken, or of another format."""
    path = directory / FILE_NAME
    if not is_file(path):
        raise FormatError(f"{directory} has no {FILE_NAME}; name the student/ directory that a run left")
    try:
        content = parse_object(read_text(path))
        if content.get("format", FORMAT) != FORMAT:
            found = short_repr(content["format"])
            raise FormatError(
                f"{path} has format {found}; this version of miles_dmd reads {FORMAT}: install a newer one"
            )
        fields(FIELDS)("", content)
    except ValueError as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(
            f"{path} is not a {FILE_NAME} of format {FORMAT} ({printable(str(error))}); export the student again"
        ) from None
    del content["format"]
    sigmas, weights = tuple(map(float, content.pop("sigmas"))), content.pop("weights")
    return Distillation(**content, sigmas=sigmas, weights=weights and ExportReport(**weights))
