"""The digits evaluation: true measures, exact repeats, and one line for what it cannot measure."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "digits"
TEACHER = EXAMPLE / "teacher"
CALL = {"num_inference_steps": 4, "max_sequence_length": 12, "height": 64, "width": 64}
DISTILLATION = {
    "format": 1,
    "sigmas": [1.0, 0.9, 0.75, 0.5],
    "solver": "renoise",
    "teacher": str(TEACHER),
    "policy_version": 7,
    "student_call": {**CALL, "guidance_scale": 1.0, "sigmas": [1.0, 0.75, 0.5, 0.25]},
    "teacher_call": {**CALL, "guidance_scale": 1.5},
    "teacher_sha256": "",
    "weights": None,
}


@pytest.fixture(scope="module")
def evaluate():
    """The script as a module; its siblings are found as when it runs."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        import evaluate

        yield evaluate
    finally:
        sys.path.remove(str(EXAMPLE))


@pytest.fixture
def student(tmp_path):
    """An export as a run leaves it, whose student has learned nothing: the teacher's weights."""
    from diffusers import FlowMatchLCMScheduler

    directory = tmp_path / "student"
    shutil.copytree(TEACHER, directory)
    FlowMatchLCMScheduler(shift=3.0).save_pretrained(directory / "scheduler")
    index = json.loads((directory / "model_index.json").read_text())
    index["scheduler"] = ["diffusers", "FlowMatchLCMScheduler"]
    (directory / "model_index.json").write_text(json.dumps(index))
    (directory / "distillation.json").write_text(json.dumps(DISTILLATION))
    return directory


def test_help_needs_no_torch():
    code = "import sys, evaluate; assert 'torch' not in sys.modules and 'diffusers' not in sys.modules"

    subprocess.run([sys.executable, "-c", code], cwd=EXAMPLE, check=True)


def test_an_untrained_student_measures_exactly_as_the_baseline(evaluate, student, tmp_path, capsys):
    report = tmp_path / "numbers.json"

    code = evaluate.main(["--student", str(student), "--samples", "100", "--json", str(report)])

    result = json.loads(report.read_text())
    assert code == 0
    assert result["format"] == 1
    assert result["sigmas"] == [1.0, 0.9, 0.75, 0.5]
    assert result["rows"]["student"] == result["rows"]["baseline"]
    assert result["rows"]["teacher"]["frechet_teacher"] == pytest.approx(0, abs=1e-6)
    assert result["rows"]["teacher"]["diversity"] == 1
    assert result["rows"]["teacher, other seeds"]["frechet_teacher"] > 0
    assert "student / baseline, Frechet distance to the teacher: 1.00" in capsys.readouterr().out


def test_samples_repeat_exactly_for_a_seed_and_differ_for_another(evaluate):
    pipeline = evaluate.open_pipeline(TEACHER)
    pipeline.scheduler = evaluate.student_scheduler(pipeline, "renoise")

    first, labels = evaluate.sample(pipeline, DISTILLATION["student_call"], 20, seed=3)
    again, _ = evaluate.sample(pipeline, DISTILLATION["student_call"], 20, seed=3)
    other, _ = evaluate.sample(pipeline, DISTILLATION["student_call"], 20, seed=4)

    assert labels.tolist() == [*range(10), *range(10)]
    assert first.equal(again)
    assert not first.equal(other)
    assert evaluate.grid_of(pipeline) == [1.0, 0.9, 0.75, 0.5]


class Drawing:
    """Draws as StableDiffusion3Pipeline with a re-noising scheduler does, and remembers what."""

    def __init__(self):
        self.initial, self.fresh = [], []

    def __call__(self, prompts, *, generator, output_type):
        self.initial += [torch.randn(4, 8, 8, generator=one) for one in generator]
        self.fresh += [*torch.randn(len(prompts), 4, 8, 8), *torch.randn(len(prompts), 4, 8, 8)]
        return SimpleNamespace(images=torch.zeros(len(prompts), 3, 64, 64))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_noise_is_drawn_twice(evaluate, seed):
    pipeline = Drawing()

    evaluate.sample(pipeline, {}, 250, seed)

    drawn = [noise.numpy().tobytes() for noise in (*pipeline.initial, *pipeline.fresh)]
    assert len(set(drawn)) == len(drawn) == 250 * 3


def test_another_teacher_than_the_students_is_refused(evaluate, student, tmp_path, capsys):
    said = {**DISTILLATION, "teacher": "digits", "teacher_sha256": "0" * 64}
    (student / "distillation.json").write_text(json.dumps(said))

    assert evaluate.main(["--student", str(student), "--samples", "100"]) == 2
    assert f"--teacher {TEACHER} is not the teacher of this student, digits" in capsys.readouterr().err


def test_the_shipped_teacher_draws_the_digit_that_was_asked_for(evaluate):
    from digits import TEACHER_CALL, accuracy, shipped_classifier

    ink, labels = evaluate.sample(evaluate.open_pipeline(TEACHER), TEACHER_CALL, 60, seed=0)

    assert accuracy(shipped_classifier(), ink, labels) > 0.95


def test_a_grid_that_the_call_does_not_give_is_refused(evaluate, student, capsys):
    wrong = {**DISTILLATION, "sigmas": [1.0, 0.8577, 0.6022, 0.0089]}
    (student / "distillation.json").write_text(json.dumps(wrong))

    assert evaluate.main(["--student", str(student), "--samples", "100"]) == 2
    assert "student_call samples at [1.0, 0.9, 0.75, 0.5]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (json.dumps({**DISTILLATION, "format": 2}), "has format 2; this version of miles_dmd reads 1"),
        (json.dumps([]), "is not a distillation.json of format 1"),
        (json.dumps({"format": 1}), "is not a distillation.json of format 1"),
        ("{", "not JSON"),
        (json.dumps({**DISTILLATION, "solver": "heun"}), "names solver 'heun', known are renoise, euler"),
        (None, "has no distillation.json"),
    ],
)
def test_a_student_that_cannot_be_read_is_refused_in_one_line(evaluate, student, capsys, text, complaint):
    if text is None:
        (student / "distillation.json").unlink()
    else:
        (student / "distillation.json").write_text(text)

    code = evaluate.main(["--student", str(student)])

    error = capsys.readouterr().err
    assert code == 2
    assert complaint in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--student", "nowhere"], "--student nowhere is not a directory"),
        (["--teacher", str(EXAMPLE)], "is not a pipeline directory"),
        (["--json", "nowhere/numbers.json"], "its directory does not exist"),
    ],
)
def test_a_bad_path_is_refused_in_one_line(evaluate, capsys, arguments, complaint):
    code = evaluate.main(arguments)

    error = capsys.readouterr().err
    assert code == 2
    assert complaint in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--samples", "55"], ["--samples", "0"], ["--threads", "0"]])
def test_a_count_that_cannot_be_is_refused(evaluate, arguments):
    with pytest.raises(SystemExit) as refusal:
        evaluate.parse(arguments)

    assert refusal.value.code == 2
