"""Processes are killed for real, in every phase: the run says who died, leaves nothing, and goes on bit-equal."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from processes import is_loopback, listening, lives, named, sockets, tree, wait_for
from safetensors.torch import load_file

from miles_dmd.errors import ClusterError
from miles_dmd.observe.metrics import read_metrics
from miles_dmd.run import DistillationTrainer

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
FAULTY = ("--loss-type", "faulty.loss", "--rollout-engine", "faulty.engine", "--save-interval", "1")
CYCLES = 3
"""One of warm-up, two with a student step; processes die in the second."""
GONE = 120
PLACES = {"student": "student 1", "fake": "fake 3", "sync": "sync 1"}
HELD_BY = {"student": "actor-0", "fake": "critic-0", "sync": "rollout"}


@pytest.fixture(scope="module")
def reference(make_args, faults, tmp_path_factory):
    """The same run, in one process, and not killed."""
    directory = tmp_path_factory.mktemp("reference")
    DistillationTrainer(make_args(*FAULTY, "--local", "--save", str(directory))).fit()
    return directory


@pytest.fixture(autouse=True)
def clean(faults):
    for path in faults.iterdir():
        path.unlink()


def state(directory):
    """Every tensor of the last checkpoint: networks, average, moments, waiting samples."""
    checkpoint = directory / "checkpoints" / f"cycle_{CYCLES:06d}"
    files = sorted(checkpoint.rglob("*.safetensors"))
    return {
        f"{file.relative_to(checkpoint)} {name}": value for file in files for name, value in load_file(file).items()
    }


def assert_resumes_bit_equal(make_args, directory, reference):
    checkpoints = [path.name for path in (directory / "checkpoints").iterdir() if (path / "manifest.json").exists()]
    assert "cycle_000001" in checkpoints
    DistillationTrainer(make_args(*FAULTY, "--local", "--save", str(directory), "--load", "latest")).fit()
    expected, found = state(reference), state(directory)
    assert found.keys() == expected.keys()
    assert [name for name in expected if not found[name].equal(expected[name])] == []
    assert [row["cycle"] for row in read_metrics(directory / "metrics.jsonl")] == [1, 2, 3]


def saving(directory):
    """True while the checkpoint of the second cycle is being written."""
    return any((directory / "checkpoints").glob(".cycle_000002.*"))


def trigger(place, faults, directory):
    return saving(directory) if place == "save" else (faults / f"held-{HELD_BY[place]}").exists()


@pytest.mark.parametrize("place", ["student", "fake", "sync", "save"])
@pytest.mark.parametrize("victim", ["rank", "rollout"])
def test_killed_process_ends_the_run_which_goes_on_bit_equal(
    ray_cluster, faults, make_args, reference, tmp_path, place, victim
):
    rank = "critic-0" if place in ("student", "fake") else "actor-0"
    who, called = (rank, rank.replace("-", " rank ")) if victim == "rank" else ("rollout", "the rollout worker")
    if place != "save":
        (faults / "order").write_text(f"hold {PLACES[place]}")
    killed = []

    def kill():
        wait_for(lambda: trigger(place, faults, tmp_path), 240, place)
        os.kill(int((faults / f"pid-{who}").read_text()), signal.SIGKILL)
        killed.append(time.monotonic())

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(ClusterError, match=rf"^the process of {called} \(pid \d+\) died while") as raised:
        DistillationTrainer(make_args(*FAULTY, "--save", str(tmp_path))).fit()
    seconds = time.monotonic() - killed[0]
    thread.join()
    pids = [int(path.read_text()) for path in faults.glob("pid-*")]

    assert "\n" not in str(raised.value)
    seconds += wait_for(lambda: not any(map(lives, pids)), GONE, "actors are gone")
    assert seconds < GONE
    print(f"{victim} in {place}: gone after {seconds:.1f} s")
    (faults / "order").unlink(missing_ok=True)
    assert_resumes_bit_equal(make_args, tmp_path, reference)


class Run:
    """A run in a process of its own, with a cluster of its own."""

    def __init__(self, flags, directory, order=""):
        self.directory, self.faults = directory / "run", directory / "faults"
        self.faults.mkdir(parents=True)
        if order:
            (self.faults / "order").write_text(order)
        self.output = directory / "output"
        command = [sys.executable, str(ROOT / "train_diffusion.py"), *flags, "--save", str(self.directory)]
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, env=os.environ | {"FAULTS": str(self.faults)},
                start_new_session=True,
            )  # fmt: skip

    def wait(self, condition, what, seconds=240):
        wait_for(lambda: condition() or self.process.poll() is not None, seconds, what)
        assert self.process.poll() is None, self.output.read_text()

    def look(self):
        """Remembers what there is: processes, ports, the cluster's directory."""
        self.pids = tree(self.process.pid)
        self.sockets = listening(self.pids)
        (guardian,) = named(self.pids, "guardian.py")
        self.cluster = Path(Path(f"/proc/{guardian}/cmdline").read_text().split("\0")[-2])

    def assert_gone(self, since):
        seconds = wait_for(lambda: not any(map(lives, self.pids)), GONE - (time.monotonic() - since), "processes")
        print(f"gone after {time.monotonic() - since:.1f} s ({seconds:.1f} s after the driver)")
        assert not self.cluster.exists()
        left = lambda: self.sockets.keys() & sockets().keys()  # the very sockets: others may take their ports  # noqa: E731
        wait_for(lambda: not left(), GONE - (time.monotonic() - since), f"none of {self.sockets} held by anybody")

    def end(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@pytest.fixture
def start(flags, faults, tmp_path):
    runs = []

    def begin(order="", *more):
        runs.append(Run(flags(*FAULTY, *more), tmp_path / str(len(runs)), order))
        return runs[-1]

    yield begin
    for run in runs:
        run.end()


def last_line(run):
    return run.output.read_text().splitlines()[-1]


def test_two_runs_at_once_share_nothing_and_survive_each_others_drivers(start, make_args, reference):
    runs = [start(f"hold {PLACES[place]}") for place in ("student", "fake")]
    for run, place in zip(runs, ("student", "fake"), strict=True):
        run.wait(lambda run=run, place=place: trigger(place, run.faults, run.directory), place)
        run.look()
    first, second = runs

    assert [address for run in runs for address, _ in run.sockets.values() if not is_loopback(address)] == []
    assert first.sockets
    assert not {*first.sockets.values()} & {*second.sockets.values()}
    assert not first.pids & second.pids
    assert first.cluster != second.cluster

    since = time.monotonic()
    first.process.kill()
    assert first.process.wait() == -signal.SIGKILL
    first.assert_gone(since)
    assert all(map(lives, second.pids))
    since = time.monotonic()
    second.process.kill()
    second.process.wait()
    second.assert_gone(since)
    for run in runs:
        assert_resumes_bit_equal(make_args, run.directory, reference)


def test_driver_killed_in_weight_sync_and_in_save_leaves_nothing(start, make_args, reference):
    syncing, saving_run = start(f"hold {PLACES['sync']}"), start()
    saving_run.wait(lambda: (saving_run.directory / "checkpoints" / "cycle_000001").exists(), "first checkpoint")
    saving_run.look()  # everybody is there, and the second save is yet to come
    saving_run.wait(lambda: saving(saving_run.directory), "save")
    since = time.monotonic()
    saving_run.process.kill()
    saving_run.process.wait()
    saving_run.assert_gone(since)
    assert not (saving_run.directory / "checkpoints" / "cycle_000002").exists()  # it was in the middle of it

    syncing.wait(lambda: trigger("sync", syncing.faults, syncing.directory), "sync")
    syncing.look()
    since = time.monotonic()
    syncing.process.kill()
    syncing.process.wait()
    syncing.assert_gone(since)
    for run in (syncing, saving_run):
        assert_resumes_bit_equal(make_args, run.directory, reference)


def test_ray_that_stands_still_is_left_all_the_same(start):
    """Its GCS is stopped, not dead: nothing that is asked of it is ever answered."""
    run = start(f"hold {PLACES['fake']}", "--save-interval", "0")
    run.wait(lambda: trigger("fake", run.faults, run.directory), "fake")
    run.look()
    (gcs,) = named(run.pids, "gcs_server")
    os.kill(gcs, signal.SIGSTOP)
    since = time.monotonic()
    run.process.terminate()

    assert run.process.wait(GONE) == 143, run.output.read_text()
    run.assert_gone(since)
    assert last_line(run) == "train_diffusion.py: stopped by SIGTERM; it has no checkpoint"


def test_end_of_ray_while_it_is_left_is_not_waited_for(start):
    """Ray's core would end the driver, without a word of ours, 15 s after its GCS is gone."""
    run = start(f"hold {PLACES['fake']}", "--save-interval", "0")
    run.wait(lambda: trigger("fake", run.faults, run.directory), "fake")
    run.look()
    (gcs,) = named(run.pids, "gcs_server")
    os.kill(gcs, signal.SIGSTOP)  # so that whoever ends the actors waits for it
    run.process.terminate()
    run.wait((run.faults / "asks-ending its actors").exists, "actors about to be ended")
    since = time.monotonic()
    os.kill(gcs, signal.SIGKILL)

    assert run.process.wait(GONE) == 143, run.output.read_text()
    run.assert_gone(since)
    told = r"Ray's gcs_server on this machine died while (ending its actors|giving the bundles back)"
    assert re.search(told, run.output.read_text())
    assert last_line(run) == "train_diffusion.py: stopped by SIGTERM; it has no checkpoint"


@pytest.mark.parametrize("servers", [("gcs_server",), ("gcs_server", "raylet/raylet")])
def test_signal_that_ends_ray_too_names_the_last_checkpoint(start, servers):
    run = start(f"hold {PLACES['fake']}")
    run.wait(lambda: trigger("fake", run.faults, run.directory), "fake")
    run.look()
    since = time.monotonic()
    run.process.terminate()
    for server in servers:
        os.kill(named(run.pids, server)[0], signal.SIGKILL)

    assert run.process.wait(GONE) == 143, run.output.read_text()
    run.assert_gone(since)
    checkpoint = run.directory / "checkpoints" / "cycle_000001"
    assert last_line(run) == (
        f"train_diffusion.py: stopped by SIGTERM; go on with --load {checkpoint} --save {run.directory}"
    )


def test_end_of_ray_itself_is_told_in_one_line(start):
    run = start(f"hold {PLACES['fake']}")
    run.wait(lambda: trigger("fake", run.faults, run.directory), "fake")
    run.look()
    since = time.monotonic()
    (raylet,) = named(run.pids, "raylet/raylet")
    os.kill(raylet, signal.SIGKILL)

    assert run.process.wait(GONE) == 1
    run.assert_gone(since)
    assert "ClusterError: Ray's raylet on this machine died while training; go on with --load" in last_line(run)
    assert last_line(run).endswith(f"traceback in {run.directory / 'failure.log'}")
    assert run.output.read_text().count("ClusterError") == 1


@pytest.mark.parametrize("server", ["gcs_server", "raylet/raylet"])
def test_signal_while_ray_starts_leaves_nothing(start, server):
    """One of its servers is there, and the driver waits for the next."""
    run = start()
    run.wait(lambda: named(tree(run.process.pid), server), server)
    run.look()
    since = time.monotonic()
    run.process.terminate()

    assert run.process.wait(GONE) == 143, run.output.read_text()
    run.assert_gone(since)
    assert last_line(run) == "train_diffusion.py: stopped by SIGTERM; it has no checkpoint"
    assert not run.directory.exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGHUP, 129), (signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_to_the_whole_terminal_finishes_the_cycle_and_saves_it(start, number, code):
    """A terminal sends it to the group; who stops a job, to every process of it."""
    run = start("", "--num-rollout", "5000", "--save-interval", "1000")
    metrics = run.directory / "metrics.jsonl"
    run.wait(lambda: metrics.exists() and metrics.read_text().count("\n") > 3, "three cycles")
    run.look()
    since = time.monotonic()
    os.killpg(run.process.pid, number)

    assert run.process.wait(GONE) == code, run.output.read_text()
    run.assert_gone(since)
    cycle = int(read_metrics(metrics)[-1]["cycle"])
    checkpoint = run.directory / "checkpoints" / f"cycle_{cycle:06d}"
    assert (
        last_line(run)
        == f"train_diffusion.py: stopped by {number.name}; go on with --load {checkpoint} --save {run.directory}"
    )
    assert json.loads((checkpoint / "manifest.json").read_text())["counters"]["completed_cycles"] == cycle
    assert not (run.directory / "student").exists()


@pytest.mark.parametrize(
    ("saves", "signals", "code", "says"),
    [
        ("0", [signal.SIGTERM], 143, "stopped by SIGTERM; it has no checkpoint"),
        ("1", [signal.SIGTERM, signal.SIGINT], 130, "SIGTERM: finishing the running cycle to save it"),
    ],
    ids=["nothing to save: the cycle is abandoned", "a second signal leaves at once"],
)
def test_held_cycle_ends(start, saves, signals, code, says):
    """Its student phase never comes to an end."""
    run = start(f"hold {PLACES['student']}", "--local", "--save-interval", saves)
    run.wait(lambda: trigger("student", run.faults, run.directory), "student")

    for number, heard in zip(signals, [says, ""], strict=False):
        run.process.send_signal(number)
        wait_for(lambda heard=heard: heard in run.output.read_text(), GONE, heard)

    assert run.process.wait(GONE) == code
    assert says in last_line(run)


def test_rank_that_raises_in_a_collective_ends_the_run(ray_cluster, faults, make_args, tmp_path):
    (faults / "order").write_text("raise fake 3")
    args = make_args(*FAULTY, "--num-trainer-ranks", "2", "--save", str(tmp_path))

    with pytest.raises(ClusterError) as raised:
        DistillationTrainer(args).fit()
    since = (faults / "raised").stat().st_mtime
    pids = [int(path.read_text()) for path in faults.glob("pid-*")]

    assert str(raised.value) == ("critic rank 1 failed while training: RuntimeError: made to raise")
    assert len(pids) >= 4
    wait_for(lambda: not any(map(lives, pids)), GONE, "actors")
    assert time.time() - since < GONE


def test_number_that_is_not_finite_on_one_rank_is_skipped_by_all(ray_cluster, faults, make_args, tmp_path):
    """The last sample of the first student batch: it is on rank 1."""
    (faults / "order").write_text("nan student 11")
    bound = ("--num-trainer-ranks", "2", "--max-consecutive-skipped-cycles", "1")

    controller = DistillationTrainer(make_args(*FAULTY, *bound, "--save", str(tmp_path))).fit()

    assert controller.skipped_cycles == 1
    assert controller.counters.optimizer_steps == {"fake_score": 6, "student": 2}
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["skipped_cycles"], summary["policy_version"]) == (1, 2)
    assert all(bool(value.isfinite().all()) for value in state(tmp_path).values())
