"""Ray placement group of a run: rank r of every group colocated in bundle r.

    bundle 0: actor 0, critic 0, rollout      bundle 1: actor 1, critic 1      bundle 2: critic 2 ...

Groups take turns on a device, so each process asks for an equal fraction of its bundle.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from miles_dmd.errors import ClusterError, ConfigError


@dataclass(frozen=True, slots=True)
class Placement:
    """``options(bundle)`` are the Ray options of a process that shares that bundle."""

    group: PlacementGroup
    device: str
    fraction: float
    cpu_threads: int
    python: str | None = None
    """Python of its processes, as a shell reads it; by default the one of the node's raylet."""

    def options(self, bundle: int) -> dict[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle)
        resources = {"num_cpus": self.fraction} | ({"num_gpus": self.fraction} if self.device == "cuda" else {})
        threads = str(self.cpu_threads)
        # read by torch's thread pools when they are first imported, so it must be in the environment before that
        env = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
        runtime: dict[str, Any] = {"env_vars": env} | ({"py_executable": self.python} if self.python else {})
        return {"scheduling_strategy": strategy, "runtime_env": runtime, **resources}

    def nodes(self) -> dict[int, str]:
        """Bundle -> the node that it is on."""
        return dict(placement_group_table(self.group)["bundles_to_node_id"])

    def remove(self) -> None:
        remove_placement_group(self.group)


def choose_device(asked: str, bundles: int) -> str:
    """cpu or cuda, for ``--device``; auto takes CUDA when the cluster has a GPU for every bundle."""
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if asked == "cuda" and gpus < bundles:
        raise ConfigError(
            f"--device cuda: the run wants {bundles} GPUs (one a rank) and the cluster has {gpus}; pass --device "
            "cpu, or fewer --num-trainer-ranks"
        )
    if asked == "auto":
        if 0 < gpus < bundles:
            raise ConfigError(
                f"--device auto: the run wants {bundles} GPUs (one a rank) and the cluster has {gpus}; pass fewer "
                "--num-trainer-ranks, or --device cpu to leave the GPUs idle"
            )
        return "cuda" if gpus else "cpu"
    return asked


def fraction_of_bundle(occupants: int) -> float:
    """An equal share, rounded down to what Ray counts in (1/10000), so that the shares fit."""
    return math.floor(10_000 / occupants) / 10_000


def own_python() -> str | None:
    """This process's Python as a shell reads it, where that is not the path itself: Ray starts a process that has an
    environment of its own by ``bash -c "exec <path> ..."``, and a space would end the path."""
    quoted = shlex.quote(sys.executable)
    return quoted if quoted != sys.executable else None


def place(
    sizes: Mapping[str, int],
    device: str,
    cpu_threads: int,
    timeout: float,
    *,
    servers: int = 0,
    python: str | None = None,
) -> Placement:
    """Reserve a bundle a rank; ``servers`` of the rollout engine take turns on the bundles. Raises ClusterError that
    tells who wants what and what is there."""
    bundles = max(sizes.values())
    device = choose_device(device, bundles)
    bundle = {"CPU": 1.0} | ({"GPU": 1.0} if device == "cuda" else {})
    _refuse_impossible(sizes, bundles, bundle)
    group = placement_group([dict(bundle) for _ in range(bundles)], strategy="PACK")
    if not group.wait(timeout_seconds=timeout):
        remove_placement_group(group)
        raise ClusterError(f"{_wanted(sizes, bundles, bundle)}; not placed within {timeout:.0f} s: {_present()}")
    fraction = fraction_of_bundle(len(sizes) + 1 + math.ceil(servers / bundles))
    return Placement(group, device, fraction, cpu_threads, python)


def _refuse_impossible(sizes: Mapping[str, int], bundles: int, bundle: Mapping[str, float]) -> None:
    """More than the whole cluster has would wait for ever."""
    total = ray.cluster_resources()
    for resource, amount in bundle.items():
        if total.get(resource, 0) < amount * bundles:
            raise ClusterError(
                f"{_wanted(sizes, bundles, bundle)}; {_present()}: fewer --num-trainer-ranks, or more nodes"
            )


def _wanted(sizes: Mapping[str, int], bundles: int, bundle: Mapping[str, float]) -> str:
    who = ", ".join(f"{name} x{count}" for name, count in sizes.items())
    each = " + ".join(f"{amount:g} {resource}" for resource, amount in bundle.items())
    return f"trainer groups {who} and the rollout worker want {bundles} bundles of {each}"


def _present() -> str:
    rows = []
    for node in ray.nodes():
        if node["Alive"]:
            resources = node["Resources"]
            rows.append(
                f"{node['NodeManagerAddress']} has {resources.get('CPU', 0):g} CPU, {resources.get('GPU', 0):g} GPU"
            )
    free = ray.available_resources()
    return f"{'; '.join(rows)} (free: {free.get('CPU', 0):g} CPU, {free.get('GPU', 0):g} GPU)"
