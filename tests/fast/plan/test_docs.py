"""What docs/control_plane.md shows is executed as it stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from miles_dmd.plan import recipe_registry

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "control_plane.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_an_example_of_the_page_runs(number):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    run = subprocess.run([sys.executable, "-c", BLOCKS[number]], env=environment, capture_output=True, text=True)

    assert (run.returncode, run.stderr) == (0, "")


def test_the_worked_example_is_on_the_page():
    assert len(BLOCKS) == 2
    assert "controller.run(2)" in BLOCKS[0]
    assert "recipe_registry.register" in BLOCKS[1]


def test_every_recipe_and_storage_is_on_the_page():
    names = {*recipe_registry.names, "shared_base_adapters", "actor_critic", "colocated_independent"}
    assert [name for name in names if f"`{name}`" not in PAGE] == []
