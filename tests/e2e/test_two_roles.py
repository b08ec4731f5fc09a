"""Two roles of one group train in one phase, one of them a fresh module: locally, over Ray, saved and resumed."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from miles_dmd.observe.metrics import read_metrics
from miles_dmd.preflight.metric_names import metric_names
from miles_dmd.preflight.rules import resolve
from miles_dmd.run import DistillationTrainer

CYCLES = 3
"""One of warm-up, two with a student step."""


@pytest.fixture(scope="module")
def two_roles(make_args, faults):
    """``faults`` makes the plug-ins importable, for the processes of the cluster too."""
    return lambda *more: make_args("--loss-type", "two_roles.loss", "--save-interval", "1", *more)


@pytest.fixture(scope="module")
def reference(two_roles, tmp_path_factory):
    directory = tmp_path_factory.mktemp("two_roles")
    args = two_roles("--local", "--keep-checkpoints", "0", "--save", str(directory))
    trainer = DistillationTrainer(args)
    trainer.fit()
    return directory, args


def tensors(directory, cycle=CYCLES, group="critic"):
    folder = directory / "checkpoints" / f"cycle_{cycle:06d}" / group
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def losses(directory):
    rows = read_metrics(directory / "metrics.jsonl")
    return {name: [row[name] for row in rows if name in row] for name in ("fake_score/loss", "head/loss", "actor/loss")}


def test_each_role_steps_its_own_optimizer(reference):
    directory, args = reference
    rows = read_metrics(directory / "metrics.jsonl")
    saved = tensors(directory)

    assert rows[-1]["critic/loss"] == pytest.approx(rows[-1]["fake_score/loss"] + rows[-1]["head/loss"])
    assert rows[-1]["head/grad_norm"] != rows[-1]["fake_score/grad_norm"]
    assert {name.split(".")[0] for name in saved} == {"fake_score", "head"}
    assert not tensors(directory, 1)["head.network.0.weight"].equal(saved["head.network.0.weight"])
    assert not any(name.startswith("head") for name in tensors(directory, group="actor"))
    written = {name for row in rows for name in row if not name.startswith("time/")}
    assert written <= metric_names(resolve(replace(args, save=None)))


def test_resumed_run_ends_bit_equal(reference, two_roles, tmp_path):
    directory, _ = reference
    start = directory / "checkpoints" / "cycle_000001"

    DistillationTrainer(two_roles("--local", "--save", str(tmp_path), "--load", str(start))).fit()

    for group in ("critic", "actor"):
        one, other = tensors(directory, group=group), tensors(tmp_path, group=group)
        assert one.keys() == other.keys()
        assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.usefixtures("ray_cluster")
def test_ray_run_trains_both_alike(reference, two_roles, tmp_path):
    directory, _ = reference

    DistillationTrainer(two_roles("--save", str(tmp_path), "--critic-num-trainer-ranks", "2")).fit()

    expected = losses(directory)
    for name, values in losses(tmp_path).items():
        assert values == pytest.approx(expected[name], rel=1e-5), name
