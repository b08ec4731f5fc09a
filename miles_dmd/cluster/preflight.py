"""Checks of every Ray node before groups start: package version, files of the models, memory."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from miles_dmd import version
from miles_dmd.cluster.supervision.waiting import NoAnswer, gather
from miles_dmd.errors import ClusterError
from miles_dmd.preflight.places import missing_interface


@dataclass(frozen=True, slots=True)
class NodeReport:
    node: str
    version: str
    python: str
    missing: tuple[str, ...]
    free_gib: float
    interface: str
    """Fault of the network interface that its environment names, or ""."""


def report_node(node: str, files: Sequence[str]) -> NodeReport:
    """Report of this machine, on which it runs."""
    missing = tuple(path for path in files if not Path(path).is_file())
    return NodeReport(node, version.VERSION, platform.python_version(), missing, _free_gib(), missing_interface())


def check_nodes(files: Sequence[str], timeout: float = 120) -> list[NodeReport]:
    """Every node's report. Raises ClusterError that names the node and what it lacks."""
    calls = {f"node {name}": _on(node_id).remote(name, list(files)) for node_id, name in _nodes()}
    try:
        reports = gather(calls, "looking at the nodes", timeout=timeout)
    except NoAnswer as error:
        raise ClusterError(f"{error}; --placement-timeout {timeout:g} is the limit") from error
    for report in reports:
        if report.version != version.VERSION:
            raise ClusterError(
                f"node {report.node} has miles_dmd {report.version}, the driver {version.VERSION}; install the same"
            )
        if report.python.rsplit(".", 1)[0] != platform.python_version().rsplit(".", 1)[0]:
            raise ClusterError(
                f"node {report.node} runs Python {report.python}, the driver {platform.python_version()}"
            )
        if report.missing:
            raise ClusterError(
                f"node {report.node} does not see {report.missing[0]}; put it on a path that all nodes share"
            )
        if report.interface:
            raise ClusterError(f"node {report.node}: {report.interface}, and start its raylet again")
    return reports


def _nodes() -> list[tuple[str, str]]:
    return [
        (node["NodeID"], f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})")
        for node in ray.nodes()
        if node["Alive"]
    ]


def _on(node_id: str) -> Any:
    return ray.remote(report_node).options(
        num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
    )


def _free_gib() -> float:
    meminfo = Path("/proc/meminfo")
    for line in meminfo.read_text(encoding="utf-8").splitlines() if meminfo.exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 2**20
    return float("nan")
