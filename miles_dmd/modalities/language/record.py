"""distillation.json of a language model: what the student was distilled from, and how it was sampled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from miles_dmd.contracts.reports import ExportReport
from miles_dmd.contracts.student import StudentRecord, teacher_name
from miles_dmd.errors import FormatError
from miles_dmd.files import digests
from miles_dmd.inputs import is_file, parse_object, read_text
from miles_dmd.modalities.language.options import language_options
from miles_dmd.shown import printable
from miles_dmd.validators import Check, count, fields, number, optional, string

if TYPE_CHECKING:
    from miles_dmd.preflight.resolved import ResolvedRun

FORMAT = 1
FILE_NAME = "distillation.json"
REPORT = fields({"dtype": string, "change_kept": number, "stored_dtype": string, "stored_change_kept": number})
FIELDS: Mapping[str, Check] = {
    "format": count,
    "modality": string,
    "teacher": string,
    "policy_version": count,
    "teacher_sha256": string,
    "weights": optional(REPORT),
    "loss_type": string,
    "max_new_tokens": count,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageRecord(StudentRecord):
    """Sampled at temperature 1 and full support while it trained; its users choose for themselves."""

    loss_type: str
    max_new_tokens: int

    def write(self, directory: Path) -> None:
        text = json.dumps({"format": FORMAT, "modality": "language", **asdict(self)}, indent=2)
        (directory / FILE_NAME).write_text(text + "\n", encoding="utf-8")


def describe(run: ResolvedRun, policy_version: int) -> LanguageRecord:
    """The record of a run's student."""
    args, teacher = run.args, run.args.teacher_checkpoint
    return LanguageRecord(
        teacher="served" if teacher is None else teacher_name(teacher),
        teacher_sha256="" if teacher is None else run.family.fingerprint(Path(teacher), digests(args.cache_dir)),
        policy_version=policy_version,
        loss_type=args.loss_type,
        max_new_tokens=language_options(args).max_new_tokens,
    )


def read_record(directory: Path) -> LanguageRecord:
    """Raises FormatError, in one line, for a file that is missing, broken, or of another format."""
    path = directory / FILE_NAME
    if not is_file(path):
        raise FormatError(f"{directory} has no {FILE_NAME}; name the student/ directory that a run left")
    try:
        content = parse_object(read_text(path))
        fields(FIELDS)("", content)
    except ValueError as error:
        raise FormatError(
            f"{path} is not a {FILE_NAME} of a language model ({printable(str(error))}); export the student again"
        ) from None
    weights = content.pop("weights")
    del content["format"], content["modality"]
    return LanguageRecord(**content, weights=weights and ExportReport(**weights))
