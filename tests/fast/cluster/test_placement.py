"""Placement of processes, and the message where they do not fit."""

import pytest

from miles_dmd.cluster import placement
from miles_dmd.cluster.placement import choose_device, fraction_of_bundle, place
from miles_dmd.errors import ClusterError, ConfigError


@pytest.mark.parametrize("occupants", range(1, 8))
def test_fractions_of_a_bundle_fit_into_it(occupants):
    fraction = fraction_of_bundle(occupants)

    assert occupants * fraction <= 1
    assert occupants * fraction > 0.99
    assert fraction == round(fraction, 4)


@pytest.fixture
def cluster_of(monkeypatch):
    """A cluster that only says what it has."""

    def set_resources(cpus, gpus=0):
        resources = {"CPU": float(cpus), "GPU": float(gpus)}
        node = {"Alive": True, "NodeManagerAddress": "10.0.0.1", "Resources": resources}
        monkeypatch.setattr(placement.ray, "cluster_resources", lambda: resources)
        monkeypatch.setattr(placement.ray, "available_resources", lambda: resources)
        monkeypatch.setattr(placement.ray, "nodes", lambda: [node])

    return set_resources


@pytest.mark.parametrize(("gpus", "expected"), [(0, "cpu"), (2, "cuda"), (8, "cuda")])
def test_auto_takes_gpus_where_every_rank_has_one(cluster_of, gpus, expected):
    cluster_of(cpus=8, gpus=gpus)

    assert choose_device("auto", bundles=2) == expected


def test_auto_does_not_leave_gpus_idle_silently(cluster_of):
    cluster_of(cpus=8, gpus=1)

    with pytest.raises(ConfigError, match=r"--device auto: the run wants 2 GPUs .* has 1; .* --device cpu to leave"):
        choose_device("auto", bundles=2)


def test_cuda_without_gpus_is_refused_with_the_count(cluster_of):
    cluster_of(cpus=8)

    with pytest.raises(ConfigError, match=r"--device cuda: the run wants 2 GPUs .* the cluster has 0"):
        choose_device("cuda", bundles=2)


def test_what_can_never_be_placed_is_refused_at_once_saying_who_wants_what(cluster_of):
    cluster_of(cpus=2)

    with pytest.raises(ClusterError) as caught:
        place({"critic": 3, "actor": 1}, device="cpu", cpu_threads=1, timeout=100)

    message = str(caught.value)
    assert "critic x3, actor x1 and the rollout worker want 3 bundles of 1 CPU" in message
    assert "10.0.0.1 has 2 CPU" in message
    assert "--num-trainer-ranks" in message
    assert "\n" not in message
