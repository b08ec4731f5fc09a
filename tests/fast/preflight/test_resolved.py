"""A resolved run: everything between the command line and the first process is looked up once."""

import json
import shutil
import subprocess
import sys
from collections import Counter

import pytest

COUNTED = """
import json, os, sys
from collections import Counter

from miles_dmd import registry
from miles_dmd.config import trainers
from miles_dmd.losses import dmd2
from miles_dmd.run import main

counts = Counter()

def counted(what, function):
    def call(*args, **named):
        counts[what(*args)] += 1
        return function(*args, **named)
    return call

directory = sys.argv[1]
for wing in registry.WINGS.values():
    wing._load = counted(lambda path, asked: "load " + path, wing._load)
dmd2.build_plan = counted(lambda *args: "plan", dmd2.build_plan)
trainers.compute_trainer_args = counted(lambda args, trainer: "args of " + trainer.role, trainers.compute_trainer_args)
sys.addaudithook(
    lambda event, args: event == "open" and isinstance(args[0], str) and args[0].startswith(directory)
    and args[1] is None and counts.update(["read " + args[0][len(directory) + 1:]])
)
status = main(sys.argv[2:])
print(json.dumps([status, counts]))
"""


@pytest.fixture(scope="module")
def counts(teacher, flags, tmp_path_factory):
    """What a dry run of two trainers looks up, from the command line to the printed tables."""
    directory = tmp_path_factory.mktemp("counted") / "teacher"
    shutil.copytree(teacher, directory)
    words = flags("--hf-checkpoint", str(directory), "--critic-lr", "1e-6", "--dry-run")
    done = subprocess.run([sys.executable, "-c", COUNTED, str(directory), *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    status, found = json.loads(done.stdout.splitlines()[-1])
    assert status == 0
    return Counter(found)


def test_one_plan_is_built(counts):
    assert counts["plan"] == 1


def test_each_plug_in_is_loaded_once(counts):
    loads = {name.rpartition(".")[2]: count for name, count in counts.items() if name.startswith("load ")}

    assert loads == {"dmd2": 1, "diffusion": 1, "sd3": 1, "inprocess": 1, "actor": 1, "critic": 1}


def test_each_trainers_arguments_are_made_once(counts):
    # the plan of DMD2 asks for the actor's start once more, and idle flags are looked for in each trainer
    assert counts["args of critic"] <= 2
    assert counts["args of actor"] <= 3


def test_each_json_file_is_read_at_most_twice(counts):
    reads = {name: count for name, count in counts.items() if name.startswith("read ") and name.endswith(".json")}

    assert len(reads) > 5
    assert {name: count for name, count in reads.items() if count > 2} == {}
