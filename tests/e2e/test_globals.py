"""--seed is the root of all randomness, of what a plug-in draws from Python's, numpy's and torch's globals too."""

import json
import random

import numpy as np
import pytest

from miles_dmd.observe.metrics import read_metrics
from miles_dmd.run import DistillationTrainer

CYCLES = 3
"""One of warm-up, two with a student step."""
DRAWING = ("--loss-type", "drawing.loss", "--rollout-engine", "drawing.engine", "--save-interval", "1")
DRAWING += ("--keep-checkpoints", "0")


class Drawing:
    """A hook of the user's own that draws where the driver is."""

    def __init__(self):
        self.drawn = []

    def after_completed_step(self, counters, metrics, executor):
        self.drawn.append((random.random(), float(np.random.rand())))


def play(args, cycles=None):
    hook = Drawing()
    DistillationTrainer(args, hooks=hook).fit(cycles)
    return hook.drawn


def numbers(directory, after=0):
    names = ("actor/loss", "critic/loss", "actor/grad_norm", "critic/grad_norm")
    rows = [row for row in read_metrics(directory / "metrics.jsonl") if row["cycle"] > after]
    return [(row["cycle"], name, row[name]) for row in rows for name in names if name in row]


def states(directory):
    """Random states of all processes."""
    last = directory / "checkpoints" / f"cycle_{CYCLES:06d}"
    files = [last / "random.json", last / "rollout.json", *sorted(last.glob("*/rank_*.json"))]
    return {str(path.relative_to(last)): json.loads(path.read_text()) for path in files}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("where", ["local", pytest.param("ray", marks=pytest.mark.long)])
def test_plugin_that_draws_from_the_globals_gives_the_same_run_and_resumes_bit_equal(
    where, faults, make_args, request, tmp_path
):
    more = ["--local"] if where == "local" else ["--num-trainer-ranks", "2"]
    if where == "ray":
        request.getfixturevalue("ray_cluster")

    def asked(name, *flags):
        return make_args(*DRAWING, *more, "--save", str(tmp_path / name), *flags)

    random.seed(1)
    whole = play(asked("whole"))
    random.seed(2)
    begun = play(asked("begun"), CYCLES - 1)
    resumed = play(asked("begun", "--load", "latest"))

    assert [*begun, *resumed] == whole
    assert numbers(tmp_path / "begun") == numbers(tmp_path / "whole")
    assert states(tmp_path / "begun") == states(tmp_path / "whole")
    ranks = {name: state["python"] for name, state in states(tmp_path / "whole").items()}
    if where == "ray":  # every process draws for itself
        assert len(ranks) == 6
        assert len(set(map(json.dumps, ranks.values()))) == 6


def test_another_seed_draws_something_else(faults, make_args, tmp_path):
    runs = [tmp_path / "0", tmp_path / "1"]

    drawn = [play(make_args(*DRAWING, "--local", "--seed", run.name, "--save", str(run)), 2) for run in runs]

    assert drawn[0] != drawn[1]
