"""Two servers that a run has started itself die under it, one after the other, in the middle of a rollout."""

import os
import re
import signal
import threading
import time

import pytest
from processes import named, wait_for, writing_to

from miles_dmd.client import Client
from miles_dmd.engines.sglang.probe import REPORT
from miles_dmd.errors import EngineError
from miles_dmd.observe.metrics import read_metrics
from miles_dmd.run import DistillationTrainer

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]  # two servers that start beside each other on a busy machine

GONE = 30
WORKER, FRONT = "sgl_diffusion::scheduler", "miles_dmd_sglang.serve"
"""The process that computes, and the one that answers: by a word of their command lines."""
LOSSES = ("actor/loss", "critic/loss", "actor/grad_norm", "critic/grad_norm")


class ManagedServer:
    """A server of the run, from outside: its log begins with its command."""

    def __init__(self, log):
        self.log = log
        port = re.search(r"--port (\d+)", log.read_text())[1]
        self.client = Client(f"http://127.0.0.1:{port}", timeout=60.0, deadline=0.0, connections=1)

    def forwards(self):
        return self.client.post("/get_weights_checksum", {"module_names": [REPORT]})[REPORT]["counters"]["forwards"]

    def lose(self, process):
        """That one of its processes, as soon as it has begun with the next rollout."""
        (pid,) = named(writing_to(self.log), process)
        before = self.forwards()
        wait_for(lambda: self.forwards() > before, 120, "a rollout")
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def expected(make_args, tmp_path_factory):
    """The run's rows, in process."""
    directory = tmp_path_factory.mktemp("inprocess")
    DistillationTrainer(make_args("--local", "--save", str(directory))).fit()
    return losses(directory)


def cycles(directory):
    """Cycles of a run that is writing: its first line is a heading."""
    path = directory / "metrics.jsonl"
    return path.read_text().count("\n") - 1 if path.exists() else 0


def losses(directory):
    rows = read_metrics(directory / "metrics.jsonl")
    return [{name: row[name] for name in LOSSES if name in row} for row in rows]


def test_run_goes_on_with_the_second_server_and_ends_at_once_without_any(
    make_args, sglang_python, ray_cluster, expected, tmp_path, caplog
):
    run, logs, cache, died = tmp_path / "run", tmp_path / "logs", tmp_path / "cache", []
    flags = ("--sglang-python", sglang_python, "--num-sglang-servers", "2", "--sglang-log-dir", str(logs))
    more = ("--sglang-weights", "disk", "--cache-dir", str(cache), "--num-rollout", "60", "--save", str(run))

    def end_servers():
        for number, process in enumerate((WORKER, FRONT)):
            wait_for(lambda number=number: cycles(run) > number, 400, f"cycle {number + 1}")
            (log,) = logs.glob(f"*-server{number}.log")
            ManagedServer(log).lose(process)
            died.append(time.monotonic())

    thread = threading.Thread(target=end_servers)
    thread.start()
    with pytest.raises(EngineError, match=r"no SGLang server is left: .*; .*"):
        DistillationTrainer(make_args("--rollout-engine", "sglang", *flags, *more)).fit()
    seconds = time.monotonic() - died[1]
    thread.join()

    assert seconds < GONE
    print(f"ended {seconds:.1f} s after the second server")
    wait_for(lambda: not any(map(writing_to, logs.iterdir())), GONE - seconds, "servers are gone")
    assert list((cache / "sglang" / "weights").iterdir()) == []
    assert re.search(r"the rollout worker: http://127.0.0.1:\d+ is evicted: .* restart the server", caplog.text)
    assert re.search(r"rollout server 1: the SGLang server at .* ended with status -9: .* \(log: ", caplog.text)
    found = losses(run)
    assert len(found) >= 2
    for row, wanted in zip(found, expected, strict=False):
        assert row == pytest.approx(wanted, rel=1e-4)
