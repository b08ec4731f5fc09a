"""Devices that a run wants and this machine does not have, refused before Ray starts."""

import pytest

from miles_dmd.errors import ConfigError
from miles_dmd.preflight import places


@pytest.fixture
def machine(monkeypatch):
    """As the driver would count its GPUs; None is what cannot be counted here, ROCm's."""
    monkeypatch.delitem(places.sys.modules, "ray", raising=False)  # of a test before
    return lambda gpus: monkeypatch.setattr(places, "cuda_devices", lambda: gpus)


@pytest.mark.parametrize(
    ("gpus", "more", "wanted"),
    [
        (1, ("--device", "auto", "--num-trainer-ranks", "2"), 2),
        (1, ("--device", "cuda", "--num-trainer-ranks", "4"), 4),
        (2, ("--device", "auto", "--critic-num-trainer-ranks", "4"), 4),
    ],
)
def test_too_few_gpus_are_refused_with_both_numbers(machine, make_args, gpus, more, wanted):
    machine(gpus)

    with pytest.raises(ConfigError, match=rf"wants {wanted} GPUs .one a rank. and this machine has {gpus}; pass fewer"):
        make_args(*more)


@pytest.mark.parametrize(
    ("gpus", "more"),
    [
        (0, ("--device", "auto", "--num-trainer-ranks", "2")),
        (1, ("--device", "auto")),
        (1, ("--device", "cuda", "--local")),
        (1, ("--device", "cpu", "--num-trainer-ranks", "2")),
        (2, ("--device", "auto", "--num-trainer-ranks", "2")),
        (None, ("--device", "cuda", "--num-trainer-ranks", "2")),
        (1, ("--device", "cuda", "--num-trainer-ranks", "2", "--ray-address", "127.0.0.1:6379")),
        (1, ("--device", "cuda", "--num-trainer-ranks", "2", "--dry-run")),
    ],
)
def test_enough_or_unknown_is_not(machine, make_args, gpus, more):
    machine(gpus)

    assert make_args(*more).num_trainer_ranks in (1, 2)


def test_a_process_that_speaks_to_a_cluster_counts_there(machine, make_args, monkeypatch):
    machine(1)
    monkeypatch.setitem(places.sys.modules, "ray", object())

    assert make_args("--num-trainer-ranks", "2", "--device", "cuda").num_trainer_ranks == 2
