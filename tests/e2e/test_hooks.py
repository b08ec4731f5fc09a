"""User hooks: named on the command line, reporting metrics, with state in the checkpoint."""

import json
import re
import sys
from pathlib import Path

import pytest

from miles_dmd.errors import ConfigError
from miles_dmd.observe.metrics import read_metrics
from miles_dmd.run import DistillationTrainer, main

PAGE = Path(__file__).parents[2] / "docs" / "hooks.md"
NAME = "lab.brightness:Brightness"
SHORT = ("--local", "--num-rollout", "3", "--fake-update-ratio", "1", "--save-interval", "1")


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """The hook of the page, which looks at every step here; and others."""
    body = re.search(r"<!-- file: lab/brightness.py -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "brightness.py").write_text(body.replace("% 10", "% 1"))
    (tmp_path / "lab" / "odd.py").write_text(
        "class Nothing:\n    pass\n\n\n"
        "def no_hook(args, report):\n    return Nothing()\n\n\n"
        "class Silent:\n    def __init__(self, args, report):\n        self.report = report\n\n"
        "    def after_completed_step(self, counters, metrics, executor):\n"
        "        self.report({'odd': float('nan')})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "lab"]:
        del sys.modules[name]


def test_hook_reports_remembers_and_decides_which_student_is_best(lab, flags, tmp_path):
    best = ("--hook", NAME, "--keep-best", "max:hook/brightness", "--sample-interval", "1")
    save = ("--save", str(tmp_path / "run"))

    assert main(flags(*SHORT, *best, *save)) == 0

    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["global_step"]]
    brightness = [row["hook/brightness"] for row in rows]
    assert [row["hook/brightest"] for row in rows] == [max(brightness[: n + 1]) for n in range(3)]
    kept = json.loads((tmp_path / "run" / "student_best" / "best.json").read_text())
    assert (kept["value"], kept["metric"]) == (max(brightness), "hook/brightness")
    driver = json.loads((tmp_path / "run" / "checkpoints" / "cycle_000004" / "driver.json").read_text())
    assert driver["observers"][NAME] == {"most": max(brightness)}


def test_resumed_hook_goes_on_from_its_state(lab, make_args, tmp_path):
    asked = (*SHORT, "--hook", NAME, "--save", str(tmp_path / "run"))
    DistillationTrainer(make_args(*asked)).fit(2)
    trainer = DistillationTrainer(make_args(*asked, "--load", "latest"))
    path = tmp_path / "run" / "checkpoints" / "cycle_000002" / "driver.json"
    before = json.loads(path.read_text())["observers"][NAME]["most"]

    trainer.fit(1)

    after = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    assert 0 < before <= after["hook/brightest"] == max(before, after["hook/brightness"])
    assert trainer.hooks[1].most == after["hook/brightest"]


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        (("lab.brightness:Brightnes",), "did you mean Brightness?"),
        (("lab.brightness",), "must be written package.module:attribute"),
        (("lab.gone:Hook",), "there is no module 'lab.gone'"),
        ((NAME, NAME), "is there twice"),
    ],
)
def test_hook_that_is_not_there_is_refused_at_the_door(lab, flags, capsys, hook, words):
    assert main(flags("--dry-run", "--hook", *hook)) == 2

    said = capsys.readouterr().err
    assert (said.count("\n"), "--hook" in said) == (1, True)
    assert words in said


def test_factory_that_returns_no_hook_is_refused(lab, make_args, tmp_path):
    trainer = DistillationTrainer(make_args(*SHORT, "--hook", "lab.odd:no_hook", "--save", str(tmp_path / "run")))

    with pytest.raises(ConfigError, match=r"--hook lab.odd:no_hook returned .* has no after_completed_step"):
        trainer.fit()


def test_number_that_is_not_finite_ends_the_run_with_the_hooks_name(lab, make_args, tmp_path):
    trainer = DistillationTrainer(make_args(*SHORT, "--hook", "lab.odd:Silent", "--save", str(tmp_path / "run")))

    with pytest.raises(ValueError, match=r"--hook lab.odd:Silent reports hook/odd nan"):
        trainer.fit()


def test_metric_of_a_hook_needs_a_hook(make_args):
    with pytest.raises(ConfigError, match="no cycle of this run has a number 'hook/brightness'"):
        make_args("--keep-best", "max:hook/brightness")
