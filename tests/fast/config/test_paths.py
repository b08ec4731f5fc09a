"""Paths: one rule for all flags that name one, from the command line, a preset and Python."""

from pathlib import Path

import pytest

from miles_dmd import registry
from miles_dmd.config.args import Args
from miles_dmd.config.cli import parse_args
from miles_dmd.config.flags import ENGINE, LOSS, RUN, flags_of
from miles_dmd.config.trainers import TrainerConfig, compute_trainer_args, compute_trainer_configs
from miles_dmd.losses.dmd2 import loss_type as dmd2

SGLANG = registry.load("engines", "sglang")
FLAGS = flags_of("dmd2", dmd2, "sglang", SGLANG)
PATHS = {name: flag for name, flag in FLAGS.items() if flag.kind.path is not None and name != "--config"}
OF_RUN = {name: flag for name, flag in PATHS.items() if flag.scope in (RUN, LOSS, ENGINE)}
ENGINES = ["--rollout-engine", "sglang"]


def value_of(args, flag):
    if flag.scope == ENGINE:
        return getattr(args.engine_options, flag.argument)
    if flag.scope == RUN:
        return getattr(args, flag.argument)
    (trainer,) = (trainer for trainer in compute_trainer_configs(args) if trainer.role == flag.scope)
    assert trainer.overrides.get(flag.argument) == getattr(compute_trainer_args(args, trainer), flag.argument)
    return trainer.overrides[flag.argument]


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_what_names_a_path_says_so():
    """An argument that takes a path and is mere text would make a folder called ~."""
    words = ("dir", "path", "checkpoint", "save", "load", "data", "python", "config")
    named = {flag.argument for flag in FLAGS.values() if flag.argument.rpartition("_")[2] in words}

    assert named == {flag.argument for flag in FLAGS.values() if flag.kind.path is not None}


@pytest.mark.parametrize("name", PATHS)
def test_a_flag_has_the_home_for_a_tilde(home, name):
    args = parse_args([*ENGINES, f"{name}=~/x"])

    assert value_of(args, PATHS[name]) == f"{home}/x"


@pytest.mark.parametrize("name", OF_RUN)
def test_a_preset_has_the_home_for_a_tilde(home, tmp_path, name):
    (tmp_path / "mine.yaml").write_text(f"args: {{{PATHS[name].argument}: ~/x}}")

    args = parse_args([*ENGINES, "--config", str(tmp_path / "mine.yaml")])

    assert value_of(args, PATHS[name]) == f"{home}/x"


def test_a_trainer_of_a_preset_has_the_home_for_a_tilde(home, tmp_path):
    (tmp_path / "mine.yaml").write_text("trainers: [{role: critic, overrides: {hf_checkpoint: ~/x}}]")

    args = parse_args(["--config", str(tmp_path / "mine.yaml")])

    assert value_of(args, PATHS["--critic-hf-checkpoint"]) == f"{home}/x"


@pytest.mark.parametrize("written", ["~/x", Path("~/x")], ids=["text", "Path"])
@pytest.mark.parametrize("name", PATHS)
def test_python_has_the_home_for_a_tilde(home, name, written):
    flag = PATHS[name]
    asked = {flag.argument: written}

    if flag.scope == ENGINE:
        args = Args(rollout_engine="sglang", engine_options=SGLANG.options(**asked))
    elif flag.scope == RUN:
        args = Args(**asked)
    else:
        args = Args(trainers=(TrainerConfig(flag.scope, asked),))

    assert value_of(args, flag) == f"{home}/x"


def test_a_preset_lies_in_the_home_too(home):
    home.mkdir()
    (home / "mine.yaml").write_text("args: {lr: 3e-5}")

    assert parse_args(["--config=~/mine.yaml"]).lr == 3e-5


@pytest.mark.parametrize("name", ["~odd", "$odd"])
def test_a_file_of_an_odd_name_is_that_file(monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).touch()

    assert parse_args(["--prompt-data", name]).prompt_data == name


def test_numbers_of_a_program_become_those_of_a_command_line():
    args = Args(betas=(0, 0.999), lr=1, loss_options=dmd2.options(teacher_guidance=2))

    assert (args.betas, args.lr, args.loss_options.teacher_guidance) == ((0.0, 0.999), 1.0, 2.0)
    assert [type(value) for value in (*args.betas, args.lr, args.loss_options.teacher_guidance)] == [float] * 4
