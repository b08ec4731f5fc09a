"""The main job as the README gives it: the digits preset through Ray, and what the student is worth afterwards."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The README's first command, into a directory of the test's own."""
    directory = tmp_path_factory.mktemp("digits")
    command = [sys.executable, "train_diffusion.py", "--loss-type", "dmd2", "--config", "trainer_configs/digits.yaml"]
    environment = {name: value for name, value in os.environ.items() if not name.endswith("NUM_THREADS")}
    done = subprocess.run(
        [*command, "--save", str(directory)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return directory, done


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_student_comes_close_to_its_teacher(run, tmp_path):
    """Weaker bounds than what the README reports, so that another machine's rounding cannot break them."""
    report = tmp_path / "report.json"
    command = [sys.executable, "examples/digits/evaluate.py", "--student", str(run[0] / "student"), "--samples", "500"]
    subprocess.run([*command, "--json", str(report)], cwd=ROOT, check=True, capture_output=True, timeout=900)

    rows = json.loads(report.read_text())["rows"]

    student, baseline = rows["student"], rows["baseline"]
    assert student["frechet_teacher"] <= 0.6 * baseline["frechet_teacher"]
    assert student["accuracy"] >= 0.93
    assert student["diversity"] >= 0.75


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_run_shows_before_during_and_after(run):
    directory, done = run

    grids = sorted(path.name for path in (directory / "samples").glob("step_*.png"))

    summary = json.loads((directory / "summary.json").read_text())
    assert grids[0] == "step_000000.png"
    assert grids[-1] == f"step_{summary['counters']['global_step']:06d}.png"
    assert len(grids) >= 3
    assert (directory / "samples" / "teacher.png").is_file()
    assert "Peak memory" in done.stdout
