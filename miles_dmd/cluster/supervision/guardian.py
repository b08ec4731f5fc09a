"""Clean-up process of a local Ray cluster that outlives a kill -9 of the driver.

    driver --- pipe ---> guardian          end of the pipe, for whatever reason: every process of the cluster is ended,
      '-- Ray, its agents, actors          then the cluster's directory is removed

Ray alone leaves two of its agents behind for a minute and more when its driver is killed. This file is run by itself
(``python -I guardian.py DRIVER DIRECTORY``): it imports nothing of ours, and starts in a few hundredths of a second.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

logger = logging.getLogger(__name__)

MARK = "MILES_DMD_CLUSTER"
"""Environment variable that holds the directory of the cluster that a process was started for. It is inherited, so it
tells descent, also of a process whose parents are gone; a path among the arguments would tell of a user's ``tail -f``
on a log as well."""
SCAN_SECONDS = 1.0
PATIENCE = 20.0
"""Seconds after which ``Guardian.finish`` no longer waits."""
RESTARTS = 10
"""Guardians that are started after one that died: who kills each of them does not want one."""

Processes = dict[int, str]
"""Process id -> when it started, in clock ticks since the machine did: a number that is used again is another process.
"""


class Guardian:
    """The driver's end: starts the guardian of a cluster whose directory is ``directory``, and another one when that
    one dies."""

    def __init__(self, directory: Path) -> None:
        self._directory = str(directory)
        self._changing = threading.Lock()
        self._finishing = False
        self._process = self._start()
        threading.Thread(target=self._restart_when_dead, daemon=True, name="watches the guardian").start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), self._directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # signals of the terminal are for the driver
        )

    @contextlib.contextmanager
    def marking(self) -> Iterator[None]:
        """Mark what is started within the block as a part of the cluster."""
        before = os.environ.get(MARK)
        os.environ[MARK] = self._directory
        try:
            yield
        finally:
            os.environ.pop(MARK)
            if before is not None:
                os.environ[MARK] = before

    def _restart_when_dead(self) -> None:
        for _ in range(RESTARTS):
            self._process.wait()
            with self._changing:
                if self._finishing:
                    return
                logger.warning("the guardian of this run's Ray (process %d) died; starting another", self._process.pid)
                try:
                    with self._process:  # its pipe is closed
                        self._process = self._start()
                except OSError as error:
                    logger.warning("no guardian can be started: %s", error)
                    break
        logger.warning(
            "this run goes on without a guardian: if it is killed, end its Ray processes and remove %s", self._directory
        )

    def finish(self) -> None:
        """End what is left of the cluster, and remove its directory; returns once that is done."""
        with self._changing:
            self._finishing = True
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            done = self._process.wait(PATIENCE) == 0
        except subprocess.TimeoutExpired:
            self._process.kill()
            done = False
        if not done:
            clear(self._directory, Processes())


def members(directory: str, known: Mapping[int, str]) -> Processes:
    """Processes that live: those of ``known``, those marked with ``directory``, and all their descendants.

    ``known`` are members of an earlier look: a process may write over its environment, and its parents may be gone.
    Empty where there is no /proc.
    """
    own, parents, starts = os.getpid(), dict[int, int](), Processes()
    for entry in Path("/proc").iterdir() if Path("/proc/self/stat").exists() else ():
        if entry.name.isdigit() and int(entry.name) != own and (found := _status(entry)):
            parents[int(entry.name)], starts[int(entry.name)] = found
    inside = {pid for pid, start in known.items() if starts.get(pid) == start}
    inside |= {pid for pid in starts if pid not in inside and _is_marked(pid, directory)}
    return {pid: start for pid, start in starts.items() if inside & {pid, *_ancestors(pid, parents)}}


def _status(process: Path) -> tuple[int, str] | None:
    """(parent, start); None for one that is gone, or dead and not yet buried."""
    try:
        fields = (process / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else (int(fields[1]), fields[19])


def _is_marked(pid: int, directory: str) -> bool:
    try:
        return os.fsencode(f"{MARK}={directory}") in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # gone meanwhile, or another user's
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
        for pid, start in known.items():
            _kill(pid, start)
        if time.monotonic() > limit:
            break
        time.sleep(0.05)
    return known


def _kill(pid: int, start: str) -> None:
    """Send SIGKILL by a handle on the process: its number may belong to another one by now."""
    try:
        handles = [os.pidfd_open(pid)]
    except ProcessLookupError:
        return
    except OSError:  # a sandbox that has no such handles
        handles = []
    found = _status(Path(f"/proc/{pid}"))
    with contextlib.suppress(OSError):  # gone meanwhile, or another user's
        if found is not None and found[1] == start:
            signal.pidfd_send_signal(handles[0], signal.SIGKILL) if handles else os.kill(pid, signal.SIGKILL)
    for handle in handles:
        os.close(handle)


def watch(driver: int, directory: str) -> None:
    """Remember who belongs to the cluster until standard input ends, or ``driver`` does; then end them, and remove
    ``directory``."""
    known = Processes()
    # a copy of the driver, that somebody forked, would keep the pipe open
    while os.getppid() == driver and not select.select([sys.stdin], [], [], SCAN_SECONDS)[0]:
        known = members(directory, known)
    clear(directory, known)


def clear(directory: str, known: Processes) -> None:
    end_all(directory, known)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watch(int(sys.argv[1]), sys.argv[2])
