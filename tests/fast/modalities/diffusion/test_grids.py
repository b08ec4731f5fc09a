"""Grids tell numbers that can be compared."""

import contextlib
import json
from types import SimpleNamespace

import matplotlib
import numpy
import pytest

from miles_dmd.modalities.diffusion.grids import SampleGrids
from miles_dmd.modalities.diffusion.options import DiffusionOptions
from miles_dmd.modalities.diffusion.statistics import SampleStatistics

TEACHER = {"num_inference_steps": 28, "guidance_scale": 4.5}


class Drawing:
    """An executor of which the student's samples are ``spread`` apart."""

    averages = True

    def __init__(self, teacher=TEACHER):
        self.limits, self.spread, self.teacher = [], 1.0, teacher
        self.teachers = 0
        self.spans = SimpleNamespace(span=lambda *args, **more: contextlib.nullcontext())

    def show_teacher(self, requests, sampling):
        assert sampling == self.teacher
        self.teachers += 1
        images = numpy.zeros((len(requests), 4, 4, 3), dtype=numpy.uint8)
        return images, SampleStatistics(spread=2.0, saturation=0.001, limit=5.0)

    def show_student(self, requests, limit):
        self.limits.append(limit)
        images = numpy.zeros((len(requests), 4, 4, 3), dtype=numpy.uint8)
        return images, SampleStatistics(spread=self.spread, saturation=0.0 if limit is None else 0.5, limit=3.0)


def test_grids_compare_with_the_teachers(tmp_path):
    args = SimpleNamespace(sample_prompts=1, seed=0, modality_options=DiffusionOptions())
    told, executor = [], Drawing()
    grids = SampleGrids(args, ["a digit"], tmp_path, TEACHER, told.append)

    grids.draw_teacher(executor)
    grids.draw(0, executor)

    assert executor.limits == [5.0]
    assert told == [{"samples/diversity": 0.5, "samples/saturation": 0.5}]
    assert (tmp_path / "reference.json").read_text() == '{"spread": 2.0, "limit": 5.0}\n'
    assert {path.name for path in tmp_path.glob("*.png")} == {"teacher.png", "step_000000.png"}


@pytest.mark.parametrize(
    ("where", "texts", "teacher", "drawn"),
    [
        ("a", ["a digit"], TEACHER, 0),
        ("b", ["a digit"], TEACHER, 1),
        ("a", ["a digit", "two"], TEACHER, 1),
        ("a", ["a digit"], {"guidance_scale": 2}, 1),
    ],
    ids=["the same", "another directory", "other prompts", "other guidance"],
)
def test_resumed_run_draws_the_teacher_where_it_is_not_there(tmp_path, where, texts, teacher, drawn):
    args, executor = SimpleNamespace(sample_prompts=2, seed=0, modality_options=DiffusionOptions()), Drawing(teacher)
    first = SampleGrids(args, ["a digit"], tmp_path / "a", TEACHER)
    first.draw_teacher(Drawing())
    other = SampleGrids(args, texts, tmp_path / where, teacher)

    other.load_state_dict(json.loads(json.dumps(first.state_dict())))
    other.draw_teacher(executor)

    assert executor.teachers == drawn
    assert (tmp_path / where / "teacher.png").is_file()


def test_grids_compare_with_the_first_where_no_teacher_can_be_sampled_also_after_a_resume(tmp_path):
    args = SimpleNamespace(sample_prompts=1, seed=0, modality_options=DiffusionOptions())
    told, executor = [], Drawing()
    first, other = (SampleGrids(args, ["a digit"], tmp_path / name / "samples", {}, told.append) for name in "ab")

    first.draw_teacher(executor)
    first.draw(0, executor)
    executor.spread = 0.25
    other.load_state_dict(first.state_dict())
    other.draw(50, executor)

    assert executor.limits == [None, 3.0]
    assert told == [
        {"samples/diversity": 1.0, "samples/saturation": 0.0},
        {"samples/diversity": 0.25, "samples/saturation": 0.5},
    ]
    references = [(tmp_path / name / "samples" / "reference.json").read_text() for name in "ab"]
    assert references == ['{"spread": 1.0, "limit": 3.0}\n'] * 2


def test_grid_that_cannot_be_drawn_is_left_out_with_one_warning_and_the_numbers_are_told(tmp_path, caplog):
    """A matplotlibrc of the user's asks for LaTeX, which is not there: matplotlib raises when it writes."""
    args = SimpleNamespace(sample_prompts=1, seed=0, modality_options=DiffusionOptions())
    told = []
    grids = SampleGrids(args, ["a digit"], tmp_path, TEACHER, told.append)

    with matplotlib.rc_context({"text.usetex": True}), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", "")
        for step in (1, 2):
            grids.draw(step, Drawing())
    grids.draw(3, Drawing())

    assert len(told) == 3
    (said,) = caplog.messages
    assert said.startswith("a grid of samples is left out, and the run goes on without it: ")
    assert "latex" in said
    assert [path.name for path in tmp_path.glob("*.png")] == ["step_000003.png"]


def test_grid_and_reference_without_a_folder_are_left_out(tmp_path, caplog):
    args = SimpleNamespace(sample_prompts=1, seed=0, modality_options=DiffusionOptions())
    (tmp_path / "samples").touch()
    grids = SampleGrids(args, ["a digit"], tmp_path / "samples", TEACHER)

    grids.draw_teacher(Drawing())
    grids.draw(0, Drawing())

    assert len(caplog.messages) == 1
    assert grids.state_dict()["reference"] == {"spread": 2.0, "limit": 5.0}
