"""The composition root: a trainer from args or from a plan, with parts of one's own, and what it says if some lack."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from miles_dmd import DistillationTrainer
from miles_dmd.errors import ConfigError
from miles_dmd.plan import FakeBatchProvider, FakeDistillationHooks, FakePhaseExecutor, build_plan
from miles_dmd.preflight import rules as checks
from miles_dmd.run import main

ROOT = Path(__file__).parents[2]


@pytest.fixture
def plan():
    return build_plan("dmd2", {"model_path": "/m", "fake_update_ratio": 2}, {"distribution_matching"})


def test_invariant_12_fakes_play_a_plan(plan):
    hooks = FakeDistillationHooks()
    parts = {"executor": FakePhaseExecutor(), "batch_provider": FakeBatchProvider(num_batches=6, batch_size=1)}
    trainer = DistillationTrainer(plan=plan, hooks=hooks, **parts)

    controller = trainer.fit(num_cycles=2)

    assert controller is trainer.controller_instance
    assert controller.counters.optimizer_steps == {"student": 2, "fake_score": 4}
    assert [call["global_step"] for call in hooks.calls] == [1, 2]


def test_controller_is_made_once(plan):
    trainer = DistillationTrainer(plan=plan, executor=FakePhaseExecutor(), batch_provider=FakeBatchProvider(3, 1))

    assert trainer.build_controller() is trainer.build_controller()


@pytest.mark.parametrize("both", [True, False], ids=["both", "neither"])
def test_args_and_plan_exclude_each_other(plan, make_args, both):
    given = {"args": make_args(), "plan": plan} if both else {}

    with pytest.raises(ConfigError, match="either args, from which its plan follows, or a plan"):
        DistillationTrainer(**given)


def test_invariant_12_missing_parts_are_named(plan):
    trainer = DistillationTrainer(plan=plan)

    with pytest.raises(NotImplementedError, match="no executor and no batch_provider: inject them"):
        trainer.build_controller()
    with pytest.raises(NotImplementedError, match="no executor and no batch_provider"):
        trainer.fit(1)


def test_half_of_the_parts_is_refused(plan):
    with pytest.raises(ConfigError, match="come together"):
        DistillationTrainer(plan=plan, executor=FakePhaseExecutor())


def test_injected_parts_need_a_number_of_cycles(plan):
    trainer = DistillationTrainer(plan=plan, executor=FakePhaseExecutor(), batch_provider=FakeBatchProvider(3, 1))

    with pytest.raises(ConfigError, match="needs num_cycles"):
        trainer.fit()


def test_plan_follows_from_args(make_args):
    trainer = DistillationTrainer(make_args("--fake-update-ratio", "3"))

    assert trainer.plan.groups == ("critic", "actor")
    assert trainer.plan.optimizer_steps(2) == {"student": 2, "fake_score": 9}  # one warm-up cycle


def test_teacher_of_its_own_is_part_of_the_plan(make_args, teacher, tmp_path):
    (tmp_path / "other").symlink_to(teacher)
    plain, other = make_args(), make_args("--teacher-checkpoint", str(tmp_path / "other"))

    assert DistillationTrainer(plain).plan.fingerprint != DistillationTrainer(other).plan.fingerprint


def test_refusal_is_one_line_and_exit_code_two(capsys):
    status = main(["--loss-type", "dmd2", "--lr", "fast"])

    lines = capsys.readouterr().err.splitlines()
    assert status == 2
    assert len(lines) == 1
    assert "--lr" in lines[0]


def test_an_address_where_nobody_listens_is_refused_before_anything_is_written(flags, tmp_path):
    """In a process of its own: one that speaks to a cluster already, which an earlier test may, goes on with it."""
    with socket.socket() as taken:  # bound, and never listened on: nobody else gets the port meanwhile
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        words = flags("--ray-address", address, "--save", str(tmp_path / "run"))
        done = subprocess.run([sys.executable, ROOT / "train_diffusion.py", *words], capture_output=True, text=True)

    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert f"--ray-address {address}: no Ray cluster answers there" in line
    assert not (tmp_path / "run").exists()


def test_dry_run_writes_nothing(flags, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert main(flags("--dry-run", "--save", "run")) == 0

    assert "Schedule" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_checks_its_arguments_once(flags, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(checks, "RULES", (*checks.RULES, seen.append))

    assert main(flags("--dry-run")) == 0
    assert len(seen) == 1
