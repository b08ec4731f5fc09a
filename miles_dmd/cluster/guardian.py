"""Clean-up process of a local Ray cluster that outlives a kill -9 of the driver.

    driver --- pipe ---> guardian          end of the pipe, for whatever reason: every process of the cluster is ended,
      '-- Ray, its agents, actors          then the cluster's directory is removed

Ray alone leaves two of its agents behind for a minute and more when its driver is killed. This file is run by itself
(``python -I guardian.py DIRECTORY``): it imports nothing of ours, and starts in a few hundredths of a second.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

SCAN_SECONDS = 1.0
PATIENCE = 20.0
"""Seconds after which ``Guardian.finish`` no longer waits."""

Processes = dict[int, str]
"""Process id -> when it started, in clock ticks since the machine did: a number that is used again is another process.
"""


class Guardian:
    """The driver's end: starts the guardian of a cluster whose directory is ``directory``."""

    def __init__(self, directory: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # signals of the terminal are for the driver
        )

    def finish(self) -> None:
        """End what is left of the cluster, and remove its directory; returns once that is done."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()


def members(directory: str, known: Mapping[int, str]) -> Processes:
    """Processes that live: those of ``known``, those that ``directory`` is an argument of, and all their descendants.

    A process that Ray has renamed names no directory any more, but it is a descendant of one that does. Empty where
    there is no /proc.
    """
    own, parents, starts = os.getpid(), dict[int, int](), Processes()
    for entry in Path("/proc").iterdir() if Path("/proc/self/stat").exists() else ():
        if entry.name.isdigit() and int(entry.name) != own and (found := _status(entry)):
            parents[int(entry.name)], starts[int(entry.name)] = found
    inside = {pid for pid, start in known.items() if starts.get(pid) == start}
    inside |= {pid for pid in starts if pid not in inside and _names(pid, directory)}
    return {pid: start for pid, start in starts.items() if inside & {pid, *_ancestors(pid, parents)}}


def _status(process: Path) -> tuple[int, str] | None:
    """(parent, start); None for one that is gone, or dead and not yet buried."""
    try:
        fields = (process / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else (int(fields[1]), fields[19])


def _names(pid: int, directory: str) -> bool:
    try:
        return directory.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _ancestors(pid: int, parents: Mapping[int, int]) -> list[int]:
    line: list[int] = []
    while (pid := parents.get(pid, 0)) and pid not in line:
        line.append(pid)
    return line


def end_all(directory: str, known: Processes, patience: float = 10.0) -> Processes:
    """SIGKILL for every member until none is left, or ``patience`` is; returns those that live on."""
    limit = time.monotonic() + patience
    while known := members(directory, known):
        for pid in known:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:  # gone meanwhile, or another user's
                continue
        if time.monotonic() > limit:
            break
        time.sleep(0.05)
    return known


def watch(directory: str) -> None:
    """Until standard input ends: remember who belongs to the cluster. Then end them, and remove ``directory``."""
    known = Processes()
    while not select.select([sys.stdin], [], [], SCAN_SECONDS)[0]:
        known = members(directory, known)
    end_all(directory, known)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watch(sys.argv[1])
