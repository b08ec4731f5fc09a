"""distillation.json is read whole, or refused in one line."""

import json
from dataclasses import asdict

import pytest

from miles_dmd.contracts.reports import ExportReport
from miles_dmd.errors import FormatError
from miles_dmd.modalities.diffusion.distillation import Distillation, read_distillation

STUDENT = Distillation(
    sigmas=(1.0, 0.9, 0.75, 0.5),
    solver="renoise",
    teacher="teacher",
    teacher_sha256="ab" * 32,
    weights=ExportReport(dtype="fp32", change_kept=1.0, stored_dtype="bf16", stored_change_kept=0.2),
    policy_version=7,
    student_call={"num_inference_steps": 4, "sigmas": [1.0, 0.75, 0.5, 0.25]},
    teacher_call={"num_inference_steps": 28},
)
DOCUMENT = {"format": 1, **asdict(STUDENT)}


def test_what_is_written_is_read(tmp_path):
    STUDENT.write(tmp_path)

    assert read_distillation(tmp_path) == STUDENT


def test_newer_format_is_refused(tmp_path):
    STUDENT.write(tmp_path)
    path = tmp_path / "distillation.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))

    with pytest.raises(FormatError, match="has format 2; this version of miles_dmd reads 1"):
        read_distillation(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": 1}',
        '{"sigmas": []}',
        "[" * 9999,
        "\x00",
        json.dumps({**DOCUMENT, "sigmas": 3}),
        json.dumps({**DOCUMENT, "sigmas": ["a"]}),
        json.dumps({**DOCUMENT, "solver": None}),
        json.dumps({**DOCUMENT, "student_call": []}),
        json.dumps({**DOCUMENT, "odd": {}}),
        json.dumps({name: value for name, value in DOCUMENT.items() if name != "weights"}),
        json.dumps({**DOCUMENT, "weights": 1}),
        json.dumps({**DOCUMENT, "weights": {}}),
        json.dumps({**DOCUMENT, "weights": {**DOCUMENT["weights"], "change_kept": "all"}}),
        json.dumps({**DOCUMENT, "teacher_sha256": None}),
    ],
)
def test_broken_file_is_refused_in_one_line(tmp_path, text):
    (tmp_path / "distillation.json").write_text(text)

    with pytest.raises(FormatError, match=r"is not a distillation\.json") as caught:
        read_distillation(tmp_path)

    assert "\n" not in str(caught.value)


def test_missing_file_says_what_to_name(tmp_path):
    with pytest.raises(FormatError, match="name the student/ directory"):
        read_distillation(tmp_path)
