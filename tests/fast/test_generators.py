"""Global generators of a process: seeded for it alone, and put back where they were."""

import json
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from miles_dmd.generators import random_state, seed_globals, set_random_state


def drawn():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


@pytest.fixture(autouse=True)
def left_as_they_were():
    before = random_state()
    yield
    set_random_state(before)


def test_a_seed_and_a_process_give_the_same_numbers():
    seed_globals(3, "actor", 1)
    first = drawn()
    seed_globals(3, "actor", 1)

    assert drawn() == first


@pytest.mark.parametrize("other", [(4, "actor", 1), (3, "actor", 0), (3, "critic", 1)])
def test_another_seed_rank_or_group_gives_other_numbers_from_all_three(other):
    seed_globals(3, "actor", 1)
    first = drawn()
    seed_globals(*other)

    assert all(a != b for a, b in zip(drawn(), first, strict=True))


def test_a_state_goes_through_json():
    state = json.loads(json.dumps(random_state()))
    first = drawn()
    set_random_state(state)

    assert drawn() == first


def test_a_process_without_torch_stays_without():
    code = (
        "import sys; from miles_dmd.generators import *; seed_globals(0, 'driver'); set_random_state(random_state()); "
        "assert 'torch' not in sys.modules"
    )

    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
