"""The guardian ends what its driver started, and nothing else."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from miles_dmd.cluster import guardian
from miles_dmd.cluster.guardian import Guardian, members

CLUSTER = "import subprocess, sys, time; subprocess.Popen(['sleep', '600']); time.sleep(600)"
DRIVER = """
import subprocess, sys, time
from pathlib import Path
from miles_dmd.cluster.guardian import Guardian
directory = Path(input())  # not an argument: it would be a process of the cluster itself
guardian = Guardian(directory)
server = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(directory)], start_new_session=True)
print(server.pid, guardian._process.pid, flush=True)
time.sleep(600)
"""


def lives(pid):
    return guardian._status(Path(f"/proc/{pid}")) is not None


def wait_until(condition, seconds=10.0):
    limit = time.monotonic() + seconds
    while not condition() and time.monotonic() < limit:
        time.sleep(0.05)
    return condition()


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "mdmd-test"
    path.mkdir()
    return path


@pytest.fixture
def server(directory):
    """A process that has ``directory`` among its arguments, and a child that has not."""
    process = subprocess.Popen([sys.executable, "-c", CLUSTER, str(directory)])
    known = {}
    wait_until(lambda: len(known.update(members(str(directory), {})) or known) == 2)
    yield process
    guardian.end_all(str(directory), known)
    process.wait()


def test_members_are_those_that_name_the_directory_and_their_descendants(directory, server):
    found = members(str(directory), {})

    assert len(found) == 2
    assert server.pid in found
    assert os.getpid() not in found


def test_descendant_is_known_after_its_parent_has_gone(directory, server):
    known = members(str(directory), {})
    (child,) = known.keys() - {server.pid}

    server.kill()
    server.wait()

    assert members(str(directory), {}) == {}
    assert members(str(directory), known).keys() == {child}


def test_process_id_that_is_used_again_is_another_process(directory):
    own_child = subprocess.Popen(["sleep", "60"])

    found = members(str(directory), {own_child.pid: "1"})

    own_child.kill()
    own_child.wait()
    assert found == {}


def test_finish_ends_everything_and_removes_the_directory(directory, server):
    (directory / "socket").touch()
    started = Guardian(directory)
    wait_until(lambda: len(members(str(directory), {})) == 3)

    started.finish()

    assert server.wait(timeout=5) == -signal.SIGKILL
    assert not directory.exists()
    assert members(str(directory), {}) == {}


def test_killed_driver_leaves_nothing(directory):
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    driver.stdin.write(f"{directory}\n")
    driver.stdin.flush()
    server, guard = map(int, driver.stdout.readline().split())
    bystander = subprocess.Popen(["sleep", "60"])
    wait_until(lambda: len(members(str(directory), {})) == 3)
    (orphan,) = members(str(directory), {}).keys() - {server, guard}
    wait_until(lambda: Path(f"/proc/{orphan}/comm").read_text() == "sleep\n")
    time.sleep(2 * guardian.SCAN_SECONDS)
    os.kill(server, signal.SIGKILL)  # as Ray's servers go first, and leave agents that name no directory

    driver.kill()
    driver.wait()

    assert wait_until(lambda: not lives(orphan) and not lives(guard))
    assert not directory.exists()
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()
