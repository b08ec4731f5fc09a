"""A plan without a moving average runs: grids are of the student itself, and so is what is exported."""

import sys
import types
from dataclasses import replace

import pytest
from safetensors.torch import load_file

from miles_dmd.errors import ConfigError
from miles_dmd.losses.dmd2 import loss_type as dmd2
from miles_dmd.modalities.diffusion.distillation import read_distillation
from miles_dmd.observe.metrics import read_metrics
from miles_dmd.plan import ExportSpec
from miles_dmd.run import DistillationTrainer


def plan(args):
    whole = dmd2.plan(args)
    layout, schedule = whole.role_layout, whole.update_schedule
    kept = tuple(binding for binding in layout.bindings if binding.role != "student_ema")
    student, fake = schedule.phases
    return replace(
        whole,
        role_layout=replace(layout, bindings=kept),
        update_schedule=replace(schedule, phases=(replace(student, update_ema=False), fake)),
        objective={**whole.objective, "roles": tuple(binding.role for binding in kept)},
        export=ExportSpec(role="student"),
    )


@pytest.fixture
def unaveraged(monkeypatch):
    module = types.ModuleType("unaveraged")
    module.loss_type = replace(dmd2, plan=plan)
    monkeypatch.setitem(sys.modules, "unaveraged", module)
    return "unaveraged"


def test_run_without_an_average_draws_and_exports_the_student_itself(unaveraged, make_args, tmp_path):
    asked = ("--loss-type", unaveraged, "--local", "--num-rollout", "1", "--sample-prompts", "1", "--lr", "1e-3")

    DistillationTrainer(make_args(*asked, "--save", str(tmp_path))).fit()

    assert (tmp_path / "samples" / "step_000001.png").is_file()
    assert not [name for row in read_metrics(tmp_path / "metrics.jsonl") for name in row if "ema" in name]
    assert read_distillation(tmp_path / "student").policy_version == 1
    (trained,) = (tmp_path / "checkpoints").glob("cycle_*/actor/shard-*")
    network = {name.removeprefix("student.network."): value for name, value in load_file(trained).items()}
    exported = load_file(tmp_path / "student" / "transformer" / "diffusion_pytorch_model.safetensors")
    name = "proj_out.weight"
    assert network[name].equal(exported[name].to(network[name].dtype))


@pytest.mark.parametrize("flag", ["--ema-decay", "--ema-start-step"])
def test_what_an_average_would_read_is_refused(unaveraged, make_args, flag):
    with pytest.raises(ConfigError, match=rf"{flag} .*keeps no moving average; drop it"):
        make_args("--loss-type", unaveraged, flag, "0" if flag == "--ema-decay" else "1")
