"""distillation.json: how a distilled student, and the teacher it came from, are sampled. Knows no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from miles_dmd.errors import FormatError

FORMAT = 1
FILE_NAME = "distillation.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Distillation:
    """``student_call`` and ``teacher_call`` are keyword arguments: ``pipeline(prompt, **call)`` samples rightly."""

    sigmas: tuple[float, ...]
    """The grid that the network sees, e.g. 1, 0.9, 0.75, 0.5; the last step goes to 0."""
    solver: str
    teacher: str
    """Directory of the teacher's pipeline."""
    policy_version: int
    """Updates that the student has had."""
    student_call: Mapping[str, Any]
    teacher_call: Mapping[str, Any]

    def write(self, directory: Path) -> None:
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=2, sort_keys=False)
        (directory / FILE_NAME).write_text(text + "\n")


def read_distillation(directory: Path) -> Distillation:
    """Raises FormatError, in one line, for a file that is missing, broken, or of a newer format."""
    path = directory / FILE_NAME
    try:
        content = json.loads(path.read_text())
        found = content.pop("format")
        if found != FORMAT:
            raise FormatError(
                f"{path} has format {found}; this version of miles_dmd reads {FORMAT}: install a newer one"
            )
        return Distillation(**{**content, "sigmas": tuple(content["sigmas"])})
    except FileNotFoundError:
        raise FormatError(f"{directory} has no {FILE_NAME}; name the student/ directory that a run left") from None
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise FormatError(f"{path} is not a distillation.json of format {FORMAT}: {error}") from None
