"""Whenever a process is killed while it saves, a whole checkpoint is there to load; and a full disk takes none away.

Plain processes without Ray. One imports torch once, and forks those that are killed.
"""

import resource
import subprocess
import sys

import pytest

from miles_dmd.checkpoint.manifest import read_manifest
from miles_dmd.run import main
from miles_dmd.saving import CheckpointSaver

SAVING = """
import os, random, resource, select, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from miles_dmd.checkpoint import manifest
from miles_dmd.checkpoint.manifest import Manifest, entry_of, with_entries
from miles_dmd.checkpoint.store import CheckpointStore, find_checkpoint
from miles_dmd.errors import MilesDmdError
from miles_dmd.files import write_synced
from miles_dmd.training.state import RoleState, TrainerState

ROOT = Path(sys.argv[1])

def build():
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    network = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    role = RoleState(parameters=dict(network.named_parameters()), optimizer=optimizer, scheduler=scheduler)
    return network, optimizer, TrainerState({"student": role})

def save(store, groups, cycle):
    counters = {"global_step": cycle, "optimizer_steps": {}, "completed_cycles": cycle}
    with store.writing(cycle) as staging:
        written = []
        for name, (network, _, state) in groups.items():
            with torch.no_grad():
                for value in network.parameters():
                    value.fill_(cycle)  # so that a reader sees whether all of it is of one cycle
            (staging / name).mkdir()
            written += state.save(staging / name)
        write_synced(staging / "driver.json", str(cycle).encode())
        written.append(entry_of(staging / "driver.json", staging))
        plan = {"name": "p", "version": 1, "fingerprint": "f"}
        about = dict(run="r", parent="", loss_type="l", plan=plan, policy_version=0, groups={}, versions={}, created="")
        manifest.write_manifest(staging, with_entries(Manifest(counters=counters, files=(), **about), written))

def verified(root):
    path = find_checkpoint(str(root), None)
    content = manifest.read_manifest(path)
    manifest.check_presence(path, content)
    manifest.check_sums(path, content)
    return path, content.cycle
"""

KILLING = (
    SAVING
    + """
def child(pipe, start):
    groups = {"critic": build(), "actor": build()}
    store = CheckpointStore(ROOT / "checkpoints", keep=2)
    os.write(pipe, b"!")
    for cycle in range(start, start + 10_000):
        save(store, groups, cycle)

def assert_of_one_cycle(path, cycle):
    for name in ("critic", "actor"):
        network, _, state = build()
        state.load(path / name)
        assert all((value == cycle).all() for value in network.parameters()), (path, cycle)
    assert (path / "driver.json").read_text() == str(cycle)

draw = random.Random(0)
save(CheckpointStore(ROOT / "checkpoints"), {"critic": build(), "actor": build()}, 1)
started = time.monotonic()
save(CheckpointStore(ROOT / "checkpoints"), {"critic": build(), "actor": build()}, 2)
once = time.monotonic() - started  # how long a save takes here and now
reached, interrupted = [], 0
for _ in range(50):
    path, cycle = verified(ROOT)
    ready, tell = os.pipe()
    if not (pid := os.fork()):
        child(tell, cycle + 1)
    os.read(ready, 1)
    time.sleep(draw.uniform(0, 4 * once))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(ready), os.close(tell)
    interrupted += any(entry.name.startswith(".") for entry in (ROOT / "checkpoints").iterdir())
    path, after = verified(ROOT)
    assert_of_one_cycle(path, after)
    assert after >= cycle
    for whole in CheckpointStore(ROOT / "checkpoints").whole():
        manifest.check_sums(whole, manifest.read_manifest(whole))
    reached.append(after)
print(len(reached), interrupted, len(set(reached)))
"""
)

FULL = (
    SAVING
    + """
store, groups = CheckpointStore(ROOT / "checkpoints"), {"critic": build(), "actor": build()}
save(store, groups, 1)
for cycle, limit in enumerate(map(int, sys.argv[2:]), start=2):
    before = sorted((str(path), path.read_bytes()) for path in ROOT.rglob("*") if path.is_file())
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        save(store, groups, cycle)
        print("saved")
    except (MilesDmdError, OSError) as error:
        print(getattr(error, "strerror", None) or error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert sorted((str(path), path.read_bytes()) for path in ROOT.rglob("*") if path.is_file()) == before
save(store, groups, cycle)
assert verified(ROOT)[1] == cycle
"""
)


BEST = """
import os, signal, sys
from pathlib import Path
from types import SimpleNamespace
from miles_dmd import files, students

ROOT, exchanges = Path(sys.argv[1]), sys.argv[2] == "exchange"
if not exchanges:
    files._exchanged = lambda one, other: False  # a file system that cannot

def export(run, executor, directory):
    directory.mkdir()
    for name in ("model_index.json", "weights"):
        (directory / name).write_text(str(executor))

students.export_student = export

def keeper():
    args = SimpleNamespace(keep_best="max:m", sample_interval=1, on_save_failure="stop")
    return students.KeepBest(SimpleNamespace(args=args), ROOT / "student_best")

def keep(step):
    keeper()._keep({"metric": "m", "value": step, "global_step": step}, step)

def die_at(number):
    def count(event, arguments):
        nonlocal number
        number -= 1
        if number == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(count)

keep(1)
step = instants = survived = 0
while not survived:
    instants += 1
    before = students.read_best(ROOT / "student_best")["global_step"]
    if not (pid := os.fork()):
        die_at(instants)
        keep(before + 1)
        os._exit(0)
    survived = os.waitpid(pid, 0)[1] == 0
    aside = not (ROOT / "student_best").exists()
    assert not (aside and exchanges), instants
    keeper()
    kept = students.read_best(ROOT / "student_best")["global_step"]
    assert kept in (before, before + 1), (instants, before, kept)
    assert [path.name for path in ROOT.iterdir()] == ["student_best"], instants
    for name in ("model_index.json", "weights"):
        assert (ROOT / "student_best" / name).read_text() == str(kept)
print(instants, kept)
"""


def run(script, *words):
    done = subprocess.run([sys.executable, "-c", script, *map(str, words)], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.long
def test_killed_at_fifty_instants_a_whole_checkpoint_is_there(tmp_path):
    (line,) = run(KILLING, tmp_path)

    kills, interrupted, _ = map(int, line.split())
    assert kills == 50
    assert interrupted > 20  # in the middle of a save, not between two


@pytest.mark.parametrize("way", ["exchange", "two renames"])
def test_killed_at_every_instant_a_best_student_is_there(tmp_path, way):
    """A process that dies between two calls of the system, whichever they are."""
    (line,) = run(BEST, tmp_path, way)

    instants, kept = map(int, line.split())
    assert instants > 20
    assert kept > 2


def test_full_disk_takes_nothing_away(tmp_path):
    """No file may grow beyond a limit: what fails is the manifest, or a rank's file before it."""
    limits = (0, 100, 1500, 20_000)

    said = run(FULL, tmp_path, *limits)

    assert [line.rpartition(": ")[2] for line in said] == ["File too large"] * len(limits)


@pytest.fixture
def full_after_the_first(monkeypatch):
    """A disk on which one checkpoint has room: later, no file may grow beyond 500 kB."""
    write, unlimited = CheckpointSaver._write, resource.RLIM_INFINITY

    def limited(self, counters):
        size = unlimited if counters.completed_cycles == 1 else 500_000
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, unlimited))
        try:
            write(self, counters)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))

    monkeypatch.setattr(CheckpointSaver, "_write", limited)


@pytest.mark.parametrize(("policy", "code"), [("stop", 1), ("continue", 0)])
def test_run_on_a_full_disk_says_so_and_stops_or_goes_on(full_after_the_first, flags, tmp_path, capsys, policy, code):
    words = flags("--local", "--save", str(tmp_path), "--save-interval", "1", "--on-save-failure", policy)

    status = main(words)

    shown = capsys.readouterr()
    said = shown.err.splitlines()[-1] if code else shown.err
    first = tmp_path / "checkpoints" / "cycle_000001"
    assert status == code
    assert "the checkpoint of cycle 2 could not be written" in said
    assert "File too large" in said
    assert f"the last whole one is {first}" in said
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["cycle_000001", "latest"]
    assert read_manifest(first).cycle == 1
    assert (tmp_path / "student").is_dir() == (policy == "continue")
