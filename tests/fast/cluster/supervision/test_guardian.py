"""The guardian ends what its driver started, and nothing else."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from miles_dmd.cluster.supervision import guardian
from miles_dmd.cluster.supervision.guardian import MARK, Guardian, members

CLUSTER = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
"""A process with a child; it prints the child's number."""
DRIVER = """
import subprocess, sys, time
from pathlib import Path
from miles_dmd.cluster.supervision.guardian import Guardian
guardian = Guardian(Path(sys.argv[1]))
with guardian.marking():
    server = subprocess.Popen(
        [sys.executable, "-c", sys.argv[2]], start_new_session=True, stdout=subprocess.PIPE, text=True
    )
unmarked = subprocess.Popen(["sleep", "600"])
print(server.pid, server.stdout.readline().strip(), guardian._process.pid, unmarked.pid, flush=True)
time.sleep(600)
"""


def lives(pid):
    return guardian._status(Path(f"/proc/{pid}")) is not None


def wait_for(condition, what, seconds=60.0):
    """A limit for a busy machine; what is waited for comes in a second."""
    limit = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < limit, f"not within {seconds} s: {what}"
        time.sleep(0.02)
    return found


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "mdmd-test"
    path.mkdir()
    return path


@pytest.fixture
def begin():
    """``begin("tail", "-f", log, MARK=...)``: a process that ends with the test."""
    started = []

    def start(*command, **env):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        started.append(subprocess.Popen(list(command), env=os.environ | env, start_new_session=True, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()  # not for the end of its output: what it started holds that, too
        process.stdout.close()


@pytest.fixture
def server(begin, directory):
    """(a process that was started for the cluster, the process id of its child)"""
    process = begin(sys.executable, "-c", CLUSTER, **{MARK: str(directory)})
    child = int(process.stdout.readline())
    yield process, child
    guardian.end_all(str(directory), {})


def test_members_are_those_that_were_started_for_the_cluster_and_their_descendants(directory, server):
    process, child = server

    found = members(str(directory), {})

    assert found.keys() == {process.pid, child}
    assert all(found[pid] == guardian._status(Path(f"/proc/{pid}"))[1] for pid in found)


def test_descendant_is_known_by_itself_after_its_parent_has_gone(directory, server):
    process, child = server

    process.kill()
    process.wait()

    assert members(str(directory), {}).keys() == {child}


def test_descendant_that_wrote_over_its_environment_is_known_from_an_earlier_look(directory, begin):
    """As setproctitle does; its parent, the marked one, is there at the first look, and gone at the second."""
    blank = (
        "import os, subprocess, time; child = subprocess.Popen(['sleep', '600'], env={}); print(child.pid, flush=True);"
        "time.sleep(600)"
    )
    process = begin(sys.executable, "-c", blank, **{MARK: str(directory)})
    child = int(process.stdout.readline())
    known = members(str(directory), {})
    process.kill()
    process.wait()

    left = members(str(directory), known)

    assert members(str(directory), {}) == {}
    assert left.keys() == {child}
    assert guardian.end_all(str(directory), known) == {}
    assert not lives(child)


def test_process_id_that_is_used_again_is_another_process(directory, begin):
    other = begin("sleep", "60")

    found = members(str(directory), {other.pid: "1"})
    guardian._kill(other.pid, "1")

    assert found == {}
    assert other.poll() is None


@pytest.fixture
def bystanders(begin, directory, tmp_path):
    """A user who reads a log of the cluster, works in its directory, and runs another cluster beside it."""
    log = directory / "raylet.out"
    log.touch()
    return [
        begin("tail", "-f", str(log)),
        begin("tail", "-f", f"{MARK}={directory}", str(log)),
        begin(sys.executable, "-c", "import time; time.sleep(600)", str(directory), **{MARK: f"{directory}-2"}),
        begin("sleep", "600", **{f"X_{MARK}": str(directory)}),
    ]


def test_finish_ends_everything_and_removes_the_directory_and_hurts_nobody_else(directory, server, bystanders):
    process, child = server
    (directory / "socket").touch()
    started = Guardian(directory)

    started.finish()

    assert process.wait(timeout=60) == -signal.SIGKILL
    assert not lives(child)
    assert not directory.exists()
    assert [bystander.poll() for bystander in bystanders] == [None] * 4


def test_killed_driver_leaves_nothing_and_its_user_what_is_hers(directory, begin, bystanders):
    driver = begin(sys.executable, "-c", DRIVER, str(directory), CLUSTER)
    server, orphan, guard, unmarked = map(int, driver.stdout.readline().split())
    os.kill(server, signal.SIGKILL)  # as Ray's servers go first, and leave agents

    driver.kill()
    driver.wait()

    wait_for(lambda: not lives(orphan) and not lives(guard), "everybody gone")
    assert not directory.exists()
    assert lives(unmarked)
    assert [bystander.poll() for bystander in bystanders] == [None] * 4
    os.kill(unmarked, signal.SIGKILL)


def test_killed_driver_of_which_a_copy_lives_on_leaves_nothing(directory, begin):
    """The copy, as multiprocessing forks one, holds the pipe open."""
    forked = DRIVER.replace("print(", "import os\nif os.fork() == 0: time.sleep(600)\nprint(", 1)
    driver = begin(sys.executable, "-c", forked, str(directory), CLUSTER)
    server, orphan, guard, unmarked = map(int, driver.stdout.readline().split())

    driver.kill()
    driver.wait()
    wait_for(lambda: not lives(orphan) and not lives(server) and not lives(guard), "everybody gone")

    assert not directory.exists()
    os.kill(unmarked, signal.SIGKILL)
    os.killpg(driver.pid, signal.SIGKILL)


def test_guardian_that_is_killed_is_replaced_with_a_warning(directory, server, caplog):
    process, child = server
    started = Guardian(directory)
    first = started._process.pid

    os.kill(first, signal.SIGKILL)
    second = wait_for(lambda: started._process.pid != first and started._process, "another guardian")
    started.finish()

    assert f"the guardian of this run's Ray (process {first}) died; starting another" in caplog.text
    assert second.returncode == 0
    assert not lives(process.pid)
    assert not lives(child)
    assert not directory.exists()


def test_driver_does_the_work_of_a_guardian_that_dies_over_it(directory, server, monkeypatch):
    """Its program cannot run: each one that is started ends at once."""
    process, child = server
    monkeypatch.setattr(guardian, "__file__", str(directory / "nowhere.py"))
    started = Guardian(directory)

    started.finish()

    wait_for(lambda: not lives(process.pid) and not lives(child), "everybody gone")
    assert not directory.exists()


def test_run_whose_guardians_all_die_says_once_what_that_means(directory, monkeypatch, caplog):
    monkeypatch.setattr(guardian, "__file__", str(directory / "nowhere.py"))

    started = Guardian(directory)

    wait_for(lambda: "goes on without a guardian" in caplog.text, "the last warning")
    assert caplog.text.count("starting another") == guardian.RESTARTS
    assert f"end its Ray processes and remove {directory}" in caplog.text
    started.finish()
