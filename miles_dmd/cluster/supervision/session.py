"""Ray session: joined or started, watched, shut down. A cluster of ours listens on loopback only."""

from __future__ import annotations

import atexit
import contextlib
import logging
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import ray
import ray._private.worker

from miles_dmd.cluster.supervision.authentication import AuthMode, authenticating, mode_of, own_authentication
from miles_dmd.cluster.supervision.guardian import Guardian
from miles_dmd.cluster.supervision.timed_calls import LEAVING, TimedCalls
from miles_dmd.early import SIGNALS
from miles_dmd.errors import ClusterError, ConfigError, MilesDmdError
from miles_dmd.preflight.places import no_cluster, unheard

logger = logging.getLogger(__name__)
T = TypeVar("T")

QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
LONGEST_TEMP = 20
"""Characters: of a socket's path, 107 at most, Ray's own part takes the rest."""
RAYS = "r"
"""Ray's part of the cluster's directory. Ray lets everybody write to it, whatever the umask is; so it lies in one that
is closed to others, with its sockets and logs, and the token beside it."""


class Session:
    """A cluster that this process speaks to, and the thread that makes its ``calls``."""

    def __init__(self, address: str | None, calls: TimedCalls) -> None:
        self.address, self.calls = address, calls
        self.processes: dict[int, str] = {}
        self._gone = ""
        calls.died = self.died

    def died(self) -> str:
        """The part of Ray itself that is gone, or "". It stays gone: looking takes ten seconds where its machine is."""
        self._gone = self._gone or self._look()
        return self._gone

    def _look(self) -> str:
        if self.address is None:
            gone = [name for pid, name in self.processes.items() if not _lives(pid)]
            return f"Ray's {' and '.join(gone)} on this machine died" if gone else ""
        reason = unheard(self.address)
        return f"the Ray cluster at {self.address} does not answer any more ({reason})" if reason else ""


@contextlib.contextmanager
def ray_session(address: str | None, timeout: float, auth_mode: AuthMode = "token") -> Iterator[Session]:
    """Join the cluster at ``address``, or start one on this machine; leave it, or stop it, at the end.

    One that is started authenticates by ``auth_mode``; one that is joined knows itself what it wants. A process that
    already speaks to a cluster (a notebook, a test) keeps it. Raises ConfigError where a cluster wants another token,
    ClusterError where it is not up within ``timeout`` seconds.
    """
    calls = TimedCalls()
    if ray.is_initialized():
        yield Session(ray.get_runtime_context().gcs_address, calls)
    elif address is not None:
        with _joined_cluster(address, calls, timeout) as session:
            yield session
    else:
        with _local_cluster(calls, timeout, auth_mode) as session:
            yield session


@contextlib.contextmanager
def _local_cluster(calls: TimedCalls, timeout: float, auth_mode: AuthMode) -> Iterator[Session]:
    """In a directory of its own, so that runs on one machine share nothing; both are gone at the end."""
    directory = Path(tempfile.mkdtemp(prefix="mdmd-", dir=_root()))
    guardian = Guardian(directory)
    session = Session(None, calls)
    try:
        _hush()
        with own_authentication(auth_mode, directory), _left(calls, guardian):
            with _same_handlers(), guardian.marking():
                _start(calls, timeout, directory / RAYS)
            session.processes = _servers()
            yield session
    finally:
        guardian.finish()
        shutil.rmtree(directory, ignore_errors=True)  # what the driver wrote while it left


@contextlib.contextmanager
def _left(calls: TimedCalls, guardian: Guardian) -> Iterator[None]:
    try:
        yield
    finally:
        if not calls.answers:
            guardian.finish()  # first: leaving a cluster takes a minute when nobody answers
        _leave()


def _root() -> str | None:
    """Parent of the clusters' directories; None for the system's choice, unless Ray could not use that: it splits
    command lines at spaces, and opens no path that is not ASCII."""
    usual = tempfile.gettempdir()
    return None if len(usual) <= LONGEST_TEMP and usual.isascii() and len(usual.split()) == 1 else "/tmp"


def _start(calls: TimedCalls, timeout: float, directory: Path) -> None:
    try:
        calls.run("starting", timeout, lambda: _init(directory), _limit(timeout))
    except MilesDmdError:
        raise
    except Exception as error:  # what Ray raises here is a bare Exception, of a paragraph
        raise ClusterError(f"Ray could not be started on this machine: {str(error).split('. ')[0]}") from error


def _init(directory: Path) -> None:
    """Start Ray's processes with SIGHUP and SIGTERM blocked.

    Who stops a job by SIGTERM sends it to all of its processes, as a terminal that closes does with SIGHUP, and the
    driver finishes the cycle with them: so they inherit that both are blocked, as Ray itself blocks SIGINT for them.
    They are ended by SIGKILL, then.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGTERM})
    ray.init(address="local", include_dashboard=False, _temp_dir=str(directory), **QUIET)
    # a second for each of them is what Ray would wait for nothing; one that has no such method any more waits it
    with contextlib.suppress(AttributeError):
        node = ray._private.worker._global_node
        end = node.kill_all_processes
        node.kill_all_processes = lambda **how: end(**how | {"allow_graceful": False})


def _limit(timeout: float) -> str:
    return f"--placement-timeout {timeout:g}"


def _leave() -> None:
    """Leave Ray as far as it can be left, also where it does not answer.

    By a thread that minds no end of Ray's servers, since leaving is what ends them.
    """
    if not TimedCalls().try_run("leaving the cluster", ray.shutdown):
        atexit.unregister(ray.shutdown)  # it would wait again, without a limit


def _hush() -> None:
    """Log what Ray prints for every process that dies: a paragraph on standard output, which no setting turns off."""

    def to_log(data: Mapping[str, Any], ignore_prefix: bool) -> None:
        logger.debug("Ray: %s", " ".join(data["lines"]))

    ray._private.worker.print_to_stdstream = to_log


@contextlib.contextmanager
def _same_handlers() -> Iterator[None]:
    """Keep the program's signal handlers: Ray's core replaces them, and on SIGTERM ends with a stack trace."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _servers() -> dict[int, str]:
    """Process id -> name of the two without which nothing works, children of this process.

    Threads and children come and go while it looks: those that are gone are none of the two.
    """
    found = {}
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in map(int, _read(children).split()):
            name = _read(Path(f"/proc/{pid}/comm")).strip()
            if name in ("gcs_server", "raylet"):
                found[pid] = name
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")  # a process names itself as it likes
    except OSError:
        return ""


def _lives(pid: int) -> bool:
    """Return whether it runs: a dead child that nobody has waited for is still listed, as a zombie."""
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return bool(fields) and fields[0] != "Z"


@contextlib.contextmanager
def _joined_cluster(address: str, calls: TimedCalls, timeout: float) -> Iterator[Session]:
    if reason := unheard(address):
        raise ClusterError(no_cluster(address, reason))
    _hush()

    def join(call: Callable[[], T], seconds: float = timeout) -> T:
        try:
            return calls.run(f"joining the cluster at {address}", seconds, call, _limit(timeout))
        except ConfigError:
            raise
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ClusterError(no_cluster(address, str(error).splitlines()[0])) from error

    mode = join(lambda: mode_of(address, timeout), timeout + LEAVING)
    with authenticating(mode):
        try:
            with _same_handlers():
                join(lambda: ray.init(address=address, **QUIET))
            yield Session(ray.get_runtime_context().gcs_address, calls)
        finally:
            _leave()


def raylet_stderr() -> str:
    """Last lines of standard error of this machine's raylet, and of what it tried to start; "" where there are none."""
    node = ray._private.worker._global_node
    try:
        lines = _read(Path(node.get_logs_dir_path()) / "raylet.err").splitlines()
    except AttributeError:  # a Ray without such a method
        return ""
    return " / ".join(dict.fromkeys(line.strip() for line in lines[-2:] if line.strip()))


def every(seconds: float, question: Callable[[], str]) -> Callable[[], str]:
    """Throttle ``question`` to one call in so many seconds; in between, the last answer is returned."""
    answer, due = "", 0.0

    def asked() -> str:
        nonlocal answer, due
        if time.monotonic() >= due:
            answer, due = question(), time.monotonic() + seconds
        return answer

    return asked
