"""Saved and loaded trainers: tensors, steps, learning rate and random state, on as many ranks or others."""

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from miles_dmd.errors import CheckpointError, FormatError, SaveError
from miles_dmd.generators import random_state, set_random_state
from miles_dmd.training import state
from miles_dmd.training.state import RoleState, TrainerState


@pytest.fixture(autouse=True)
def single_rank():
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


class Average:
    def __init__(self, network):
        self.steps = 0
        self.values = {name: value.detach().clone() for name, value in network.named_parameters()}

    def named_parameters(self):
        return iter(self.values.items())


class Small:
    """A trainer of a network with a parameter that no gradient reaches."""

    def __init__(self, seed, lr=0.1):
        torch.manual_seed(seed)
        self.network = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        self.network.register_parameter("unused", nn.Parameter(torch.randn(3)))
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=lr)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.average = Average(self.network)
        self.state = TrainerState({"student": self.role_state()})

    def role_state(self):
        return RoleState(
            parameters=dict(self.network.named_parameters()), optimizer=self.optimizer, scheduler=self.scheduler,
            average=self.average,
        )  # fmt: skip

    def step(self, batch):
        self.network(batch).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.average.steps += 1
        for name, value in self.network.named_parameters():
            self.average.values[name].lerp_(value.detach(), 0.1)
        return self

    def everything(self):
        moments = {
            f"{name}.{key}": value
            for name, parameter in self.network.named_parameters()
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }
        return {**self.network.state_dict(), **{f"a.{n}": v for n, v in self.average.values.items()}, **moments}


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, 4, generator=generator) for _ in range(count)]


@pytest.fixture
def group(tmp_path):
    directory = tmp_path / "checkpoint" / "group"
    directory.mkdir(parents=True)
    return directory


def test_training_goes_on_bit_equal(group):
    first, second, third = batches(3)
    whole = Small(0).step(first).step(second)
    whole.state.save(group)
    whole.step(third)

    resumed = Small(7)
    resumed.state.load(group)
    resumed.step(third)

    a, b = whole.everything(), resumed.everything()
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []
    assert resumed.average.steps == 3
    assert resumed.scheduler.get_last_lr() == whole.scheduler.get_last_lr()
    assert resumed.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]


def test_parameter_without_a_gradient_keeps_having_no_state(group):
    Small(0).step(*batches(1)).state.save(group)
    resumed = Small(1)

    resumed.state.load(group)

    assert resumed.network.unused not in resumed.optimizer.state
    assert "unused" not in json.loads((group / "trainer.json").read_text())["roles"]["student"]["optimizer_steps"]


def test_before_the_first_step_there_are_no_moments(group):
    Small(0).state.save(group)
    resumed = Small(1)

    resumed.state.load(group)

    assert not resumed.optimizer.state
    assert torch.equal(resumed.network.unused, Small(0).network.unused)


def test_learning_rate_follows_this_runs_arguments(group):
    """It is a function of the steps taken: an allowed change of --lr takes effect."""
    Small(0, lr=0.1).step(*batches(1)).state.save(group)
    resumed = Small(0, lr=0.3)

    resumed.state.load(group)

    assert resumed.optimizer.param_groups[0]["lr"] == pytest.approx(0.15)


def test_what_is_written_is_reported_with_checksums(group):
    entries = Small(0).step(*batches(1)).state.save(group)

    assert {entry.path for entry in entries} == {
        "group/shard-00001-model-00001-of-00001.safetensors", "group/rank_0.json", "group/trainer.json"
    }  # fmt: skip
    assert all((group.parent / entry.path).stat().st_size == entry.size for entry in entries)


def test_no_pickle_is_written(group):
    Small(0).step(*batches(1)).state.save(group)

    assert {path.suffix for path in group.iterdir()} == {".safetensors", ".json"}


def test_no_pickle_is_read(group, monkeypatch):
    import pickle

    Small(0).step(*batches(1)).state.save(group)

    def refuse(*args, **kwargs):
        raise AssertionError("a pickle is read")

    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    Small(1).state.load(group)


def test_files_stay_small(group, monkeypatch):
    """A file is what a save holds in memory beside the shards."""
    monkeypatch.setattr(state, "FILE_BYTES", 64)
    trained = Small(0).step(*batches(1))

    trained.state.save(group)
    resumed = Small(1)
    resumed.state.load(group)

    assert len(list(group.glob("shard-*"))) > 5
    a, b = trained.everything(), resumed.everything()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_frozen_trainer_keeps_its_random_state_only(group):
    entries = TrainerState().save(group)
    TrainerState().load(group)

    assert [entry.path for entry in entries] == ["group/rank_0.json", "group/trainer.json"]


def test_global_generators_go_on(group):
    before = random_state()
    drawn = (random.random(), np.random.rand(), torch.rand(3))
    random.seed(5), np.random.seed(5), torch.manual_seed(5)

    set_random_state(json.loads(json.dumps(before)))

    again = (random.random(), np.random.rand(), torch.rand(3))
    assert drawn[:2] == again[:2]
    assert torch.equal(drawn[2], again[2])


def test_random_state_of_the_rank_is_restored(group):
    Small(0).state.save(group)
    expected = torch.rand(4)
    torch.manual_seed(99)

    Small(1).state.load(group)

    assert torch.equal(torch.rand(4), expected)


def test_other_network_is_refused(group):
    Small(0).state.save(group)
    other = Small(0)
    other.network.register_parameter("more", nn.Parameter(torch.zeros(2)))
    other.state = TrainerState({"student": other.role_state()})

    with pytest.raises(CheckpointError, match="holds another network: more is in one of the two only"):
        other.state.load(group)


def test_other_shape_is_refused(group):
    Small(0).state.save(group)
    other = Small(0)
    other.network.unused = nn.Parameter(torch.zeros(5))
    other.average = Average(other.network)

    with pytest.raises(CheckpointError, match="does not fit this run"):
        TrainerState({"student": other.role_state()}).load(group)


def test_other_format_is_refused(group):
    Small(0).state.save(group)
    numbers = json.loads((group / "trainer.json").read_text())
    (group / "trainer.json").write_text(json.dumps({**numbers, "format": 1}))

    with pytest.raises(FormatError, match=r"trainer\.json has an older checkpoint format, 1; .* reads format 2"):
        Small(1).state.load(group)


@pytest.mark.parametrize("name", ["trainer.json", "rank_0.json"])
def test_malformed_numbers_are_refused_by_name(group, name):
    """Each key deleted, each replaced by something else: nothing of it ends in another exception."""
    Small(0).state.save(group)
    sound = json.loads((group / name).read_text())
    changed = [{k: v for k, v in sound.items() if k != key} for key in sound if key != "format"]
    changed += [{**sound, key: value} for key in sound if key != "format" for value in ({"x": 1}, "x", [-1], True)]

    for content in changed:
        (group / name).write_text(json.dumps(content))
        with pytest.raises(CheckpointError) as refusal:
            Small(1).state.load(group)
        assert str(refusal.value).startswith(f"{group / name} ")
        assert "\n" not in str(refusal.value)


def test_directory_that_cannot_be_written_is_told(group):
    (group / "shard-00001-model-00001-of-00001.safetensors").mkdir()

    with pytest.raises(SaveError, match="rank 0: Is a directory"):
        Small(0).state.save(group)


RESHARDING = """
import os, sys, torch, torch.distributed as dist
from pathlib import Path
from torch import nn
from torch.distributed.fsdp import fully_shard
from miles_dmd.training.state import RoleState, TrainerState

directory, shown = Path(sys.argv[1]), Path(sys.argv[2])

def work(rank, ranks, action):
    store = dist.FileStore(str(shown / f"store {action} {ranks}"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    torch.manual_seed(0 if action == "save" else 1)
    network = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 1))  # rows that do not divide by the ranks, or are fewer
    fully_shard(network, mesh=dist.device_mesh.init_device_mesh("cpu", (ranks,)))
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    role = RoleState(parameters=dict(network.named_parameters()), optimizer=optimizer, scheduler=scheduler)
    state = TrainerState({"critic": role})
    if action == "load":
        state.load(directory)
    else:
        network(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        state.save(directory)
    whole = [
        (name, *(tensor.full_tensor().tolist() for tensor in (value, *map(optimizer.state[value].get, MOMENTS))))
        for name, value in network.named_parameters()
    ]
    if rank == 0:
        (shown / f"{action} {ranks}").write_text(str(whole))
    dist.barrier()

MOMENTS = ("exp_avg", "exp_avg_sq")
for ranks, action in ((2, "save"), (1, "load"), (3, "load")):
    children = []
    for rank in range(ranks):  # forked: imported once
        if not (child := os.fork()):
            work(rank, ranks, action)
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * ranks, (ranks, action)
"""


def test_other_numbers_of_ranks_read_the_same(group, tmp_path):
    """Two ranks wrote, one and three read; a shard may be short, or empty."""
    subprocess.run([sys.executable, "-c", RESHARDING, str(group), str(tmp_path)], check=True, timeout=200)

    written = (tmp_path / "save 2").read_text()
    assert (tmp_path / "load 1").read_text() == written
    assert (tmp_path / "load 3").read_text() == written
    assert len(list(group.glob("shard-*"))) == 2
    assert sorted(path.name for path in group.glob("rank_*")) == ["rank_0.json", "rank_1.json"]


MEMORY = """
import sys, torch, torch.distributed as dist
from pathlib import Path
from miles_dmd.training import state

def rss(name):
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
state.FILE_BYTES = 8 << 20
state.write_tensors(Path(sys.argv[1]), {"warm": torch.ones(8)})
for path in Path(sys.argv[1]).iterdir():
    path.unlink()
tensors = {f"t{i}": torch.ones(1 << 20) for i in range(32)}  # 128 MiB
before = rss("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
state.write_tensors(Path(sys.argv[1]), tensors)
print(rss("VmHWM") - before)
"""


def test_a_save_needs_little_more_memory_than_the_shards(group):
    """128 MiB of shards, in files of 8 MiB: a serialised copy of one file on top, not of all."""
    done = subprocess.run([sys.executable, "-c", MEMORY, str(group)], capture_output=True, text=True, check=True)

    assert float(done.stdout) < 40
    assert sum(path.stat().st_size for path in Path(group).iterdir()) > 128 << 20
