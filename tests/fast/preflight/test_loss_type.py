"""Loss types of one's own that contradict themselves: refused before their trainers start."""

import math
import os
import re
import subprocess
import sys
import types
from dataclasses import replace

import pytest

from miles_dmd import registry
from miles_dmd.config.cli import parse_args
from miles_dmd.errors import ConfigError
from miles_dmd.preflight.rules import resolve

MODULE = "miles_dmd.losses.dmd2.objective"
MATCH = f"{MODULE}:generator_loss"
BOTH = {"fake_score": f"{MODULE}:fake_score_loss", "student": MATCH}
DMD2 = "from dataclasses import replace\nfrom miles_dmd.losses.dmd2 import loss_type as dmd2\n"


def sampling(steps, guidance):
    return {"num_inference_steps": steps, "guidance_scale": guidance}


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"plan": lambda args: None}, ["--loss-type odd.loss", "its plan is None"]),
        ({"plan": lambda args: 1 / 0}, ["--loss-type odd.loss", "ZeroDivisionError: division by zero"]),
        ({"check": lambda args: args.nothing}, ["--loss-type odd.loss", "AttributeError"]),
        ({"roles": ("actor", "critic")}, ["--loss-type odd.loss", "actor, critic", "critic, actor"]),
        ({"objectives": {}}, ["its plan trains fake_score, student", "add one to objectives"]),
        ({"objectives": {"student": MATCH}}, ["its plan trains fake_score, without an objective"]),
        ({"objectives": {**BOTH, "student": "miles_dmd.no_such:f"}}, ["no module 'miles_dmd.no_such'"]),
        (
            {"objectives": {**BOTH, "student": "ast.no_such:f"}},
            ["objectives['student'] 'ast.no_such:f'", "no module 'ast.no_such'"],
        ),
        ({"objectives": {**BOTH, "student": "no_lab.loss:f"}}, ["no module 'no_lab'", "PYTHONPATH"]),
        ({"objectives": {**BOTH, "student": f"{MODULE}:match"}}, [f"module '{MODULE}' defines no 'match'"]),
        ({"objectives": {**BOTH, "student": f"{MODULE}:external"}}, ["defines no 'external'"]),
        ({"objectives": {**BOTH, "student": MODULE}}, ["must be written package.module:attribute"]),
        ({"scorers": {"critic": "no_lab:f"}}, ["scorers['critic']", "no module 'no_lab'"]),
        ({"scorers": {}}, ["needs['student'] names 'critic', which has no scorer"]),
        (
            {"needs": {"student": {"critic": ("teacher_claen",)}}},
            ["needs['student']['critic'] has 'teacher_claen'", "did you mean teacher_clean?"],
        ),
        ({"tells": {}}, ["scorers names 'critic', and tells does not"]),
        ({"needs": {"student": {"critc": ()}}}, ["names 'critc', which is no group; there are critic, actor"]),
        ({"needs": {"pupil": {"critic": ()}}}, ["needs names 'pupil'", "no role of its plan", "student"]),
        ({"teacher_sampling": lambda args: 1 / 0}, ["ZeroDivisionError"]),
        ({"teacher_sampling": lambda args: None}, ["teacher_sampling gives None"]),
        ({"teacher_sampling": lambda args: {"steps": 3}}, ["{'steps': 3}", "num_inference_steps and guidance_scale"]),
        ({"teacher_sampling": lambda args: {"num_inference_steps": 3}}, ["must give num_inference_steps and guid"]),
        ({"teacher_sampling": lambda args: sampling(0, 4.0)}, ["num_inference_steps 0", "at least 1"]),
        ({"teacher_sampling": lambda args: sampling(True, 4.0)}, ["num_inference_steps True", "whole number"]),
        ({"teacher_sampling": lambda args: sampling(3, 0.5)}, ["guidance_scale 0.5", "at least 1"]),
        ({"teacher_sampling": lambda args: sampling(3, math.nan)}, ["guidance_scale nan", "finite"]),
        ({"teacher_sampling": lambda args: sampling(3, "4")}, ["guidance_scale '4'", "finite number"]),
    ],
)
def test_a_loss_type_of_ones_own_that_is_broken_is_refused(refused, monkeypatch, change, parts):
    module = types.ModuleType("odd.loss")
    module.loss_type = replace(registry.load("losses", "dmd2"), **change)
    monkeypatch.setitem(sys.modules, "odd", types.ModuleType("odd"))
    monkeypatch.setitem(sys.modules, "odd.loss", module)

    message = refused("--loss-type", "odd.loss")

    assert all(part in message for part in ("--loss-type odd.loss", *parts)), message


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("roles", ["critic", "actor"]),
        ("roles", "actor"),
        ("objectives", None),
        ("objectives", {"student": 3}),
        ("scorers", 3),
        ("scorers", {3: MATCH}),
        ("tells", {"critic": "teacher_clean"}),
        ("needs", 3),
        ("needs", {"student": ("critic",)}),
        ("needs", {"student": {"critic": "teacher_clean"}}),
        ("metrics", {"student": "loss"}),
        ("run_wide", 3),
        ("readers", {"dm_shift": "critic"}),
        ("plan", None),
        ("teacher_sampling", 3),
        ("check", 3),
    ],
)
def test_a_part_of_another_shape_is_refused_when_the_loss_type_is_imported(
    asked, latest, tmp_path, monkeypatch, part, value
):
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("shapeless", "shapeless.loss"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "shapeless").mkdir()
    (tmp_path / "shapeless" / "loss.py").write_text(f"{DMD2}loss_type = replace(dmd2, {part}={value!r})")

    with pytest.raises(ConfigError) as refused:
        resolve(parse_args(latest([*asked, "--loss-type", "shapeless.loss"])))

    assert re.search(rf"LossType\.{part}\b.* must be a", str(refused.value))


def test_nothing_that_computes_is_imported_at_the_door(asked, latest, tmp_path):
    """Not even the packages that an objective lies in; what fills itself in while imported may define anything."""
    package = tmp_path / "heavy"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "deep" / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "deep" / "one.py").write_text("import torch\nif torch:\n    def student(): ...\n")
    (package / "deep" / "all.py").write_text("from os.path import *\n")
    objectives = {"student": "heavy.deep.one:student", "fake_score": "heavy.deep.all:follow"}
    (package / "loss.py").write_text(f"{DMD2}loss_type = replace(dmd2, objectives={objectives!r})")
    words = latest([*asked, "--loss-type", "heavy.loss"])
    code = "import sys; from miles_dmd.run import main; main(sys.argv[1:]); print('torch' in sys.modules)"

    shown = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )  # fmt: skip

    assert shown.stdout.splitlines()[-1] == "False", shown.stderr
    assert shown.stderr == ""
