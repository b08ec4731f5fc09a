"""Examples of docs/control_plane.md, executed as they stand there."""

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from miles_dmd import plan

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "control_plane.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
PARTS = (plan.DistillationPlan, plan.UpdateSchedule, plan.UpdatePhaseSpec, plan.ExportSpec)
PARTS += (plan.RoleLayoutSpec, plan.RoleGroupSpec, plan.RoleBinding)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_an_example_of_the_page_runs(number):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    run = subprocess.run([sys.executable, "-c", BLOCKS[number]], env=environment, capture_output=True, text=True)

    assert (run.returncode, run.stderr) == (0, "")


def test_the_worked_example_is_on_the_page():
    assert len(BLOCKS) == 2
    assert "controller.run(2)" in BLOCKS[0]
    assert "recipe_registry.register" in BLOCKS[1]


@pytest.mark.parametrize("part", PARTS)
def test_every_part_of_a_plan_is_said_to_be_obeyed_or_declared(part):
    table = PAGE[PAGE.index("### What a run obeys") : PAGE.index("`opd` is run by")]
    elsewhere = {"name", "role", "group"}  # of a group or a binding: what others refer to

    assert [row.name for row in fields(part) if row.name not in elsewhere and f"`{row.name}" not in table] == []


def test_every_place_where_a_plan_is_obeyed_is_there():
    table = PAGE[PAGE.index("### What a run obeys") : PAGE.index("`opd` is run by")]

    assert [name for name in re.findall(r"`([\w/]+\.py)`", table) if not (ROOT / "miles_dmd" / name).exists()] == []


def test_every_recipe_and_storage_is_on_the_page():
    names = {*plan.recipe_registry.names, "shared_base_adapters", "actor_critic", "colocated_independent"}
    assert [name for name in names if f"`{name}`" not in PAGE] == []
