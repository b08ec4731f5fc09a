"""The launcher ends with whoever holds its standard input; what it runs is a stand-in for the server."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from processes import lives, wait_for

PLUGIN = Path(__file__).parents[3] / "sglang_plugin"
SERVER = """
import os, subprocess, sys, types
sys.path.insert(0, {plugin!r})
sys.modules["miles_dmd_sglang.without_cuda"] = types.SimpleNamespace(prepare=lambda: None)
from miles_dmd_sglang import serve
serve.die_with_stdin()
child = subprocess.Popen(["sleep", "600"])
print(os.getpid(), child.pid, flush=True)
child.wait()
"""
PARENT = """
import signal, subprocess, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})  # as in a run's processes
pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
server = subprocess.Popen([sys.executable, "-c", sys.argv[1]], **pipes)
print(server.stdout.readline(), flush=True)
server.wait()
"""


def blocked(pid):
    """The signals that a process does not hear of, as a mask."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigBlk"))
    return int(line.split()[1], 16)


def test_server_and_its_children_end_when_their_parent_is_killed():
    code = SERVER.format(plugin=str(PLUGIN))
    with subprocess.Popen([sys.executable, "-c", PARENT, code], stdout=subprocess.PIPE, text=True) as parent:
        pids = list(map(int, parent.stdout.readline().split()))
        assert all(map(lives, pids))
        assert [blocked(pid) for pid in pids] == [0, 0]

        os.kill(parent.pid, signal.SIGKILL)

    wait_for(lambda: not any(map(lives, pids)), 120, "end of the server and its child")


def test_flag_that_an_older_release_lacks_is_left_out(monkeypatch):
    monkeypatch.syspath_prepend(PLUGIN)
    monkeypatch.setitem(sys.modules, "miles_dmd_sglang.without_cuda", type("Nothing", (), {"prepare": lambda: None}))
    sys.modules.pop("miles_dmd_sglang.serve", None)
    from miles_dmd_sglang import serve

    words = ["--port", "1", "--sleep-on-idle"]

    monkeypatch.setattr(serve, "version", lambda _: "0.5.22")
    assert serve.known_flags(words) == words[:2]
    monkeypatch.setattr(serve, "version", lambda _: "0.5.23")
    assert serve.known_flags(words) == words
