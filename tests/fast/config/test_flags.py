"""Flags: those that the run, its loss type and its trainers declare, and no others."""

import dataclasses

import pytest

from miles_dmd.config.cli import parse_args, parser_of
from miles_dmd.config.flags import Given, docstrings, flag_name, flags_of
from miles_dmd.errors import ConfigError
from miles_dmd.losses.dmd2 import loss_type as dmd2
from miles_dmd.registry import load

DMD2 = flags_of("dmd2", dmd2)


def test_under_dmd2_only_declared_teacher_flags_exist():
    teacher = {name for name in DMD2 if name.startswith("--teacher-")}

    declared = {flag_name(row.name) for row in dataclasses.fields(dmd2.options) if row.name.startswith("teacher_")}
    assert teacher == {"--teacher-checkpoint"} | declared


def test_every_trainer_may_read_its_own_model_and_optimizer_arguments():
    assert {"--critic-lr", "--actor-lr", "--critic-hf-checkpoint", "--actor-micro-batch-size"} <= set(DMD2)
    assert not {"--critic-rollout-batch-size", "--critic-seed", "--critic-loss-type"} & set(DMD2)


def test_a_loss_type_brings_flags_without_a_change_to_the_command_line(own_loss):
    loss_type = load("losses", own_loss("lab", ("actor",), "margin: float = 0.5\n    '''Room to the teacher.'''"))

    flags = flags_of("lab.loss", loss_type)

    assert (flags["--margin"].default, flags["--margin"].words) == (0.5, "Room to the teacher.")
    assert "--critic-lr" not in flags


def test_a_loss_type_may_not_declare_a_flag_that_every_run_has(own_loss):
    loss_type = load("losses", own_loss("clash", ("actor",), "lr: float = 0.5"))

    with pytest.raises(ConfigError, match="--loss-type clash declares --lr"):
        flags_of("clash", loss_type)


def test_help_tells_every_flag_and_its_default():
    text = " ".join(parser_of(DMD2).format_help().split())

    assert [name for name in DMD2 if name not in text] == []
    assert "[0.9 0.999]" in text
    assert "Loss type dmd2:" in text
    assert "--lr, for the critic alone." in text


def test_words_of_an_extended_dataclass_are_read_from_its_base():
    @dataclasses.dataclass(frozen=True)
    class Wider(dmd2.options):
        pass

    assert docstrings(Wider) == docstrings(dmd2.options)


def test_the_stronger_wish_wins_name_by_name():
    weak = Given({"lr": 1, "seed": 1}, {"k": 1}, {"critic": {"lr": 1, "clip_grad": 1}})
    strong = Given({"lr": 2}, {}, {"critic": {"lr": 2}, "actor": {"lr": 3}})

    both = weak.under(strong)

    assert both == Given({"lr": 2, "seed": 1}, {"k": 1}, {"critic": {"lr": 2, "clip_grad": 1}, "actor": {"lr": 3}})


def test_option_that_a_group_reads_may_be_its_trainers_own():
    assert DMD2["--critic-dm-shift"].kind == DMD2["--dm-shift"].kind
    assert "--actor-dm-shift" not in DMD2
    assert "--actor-normalizer-floor" in DMD2


@pytest.mark.parametrize(
    "name",
    ["save", "load", "model-family", "teacher-checkpoint", "max-sequence-length", "ema-decay", "ema-start-step",
     "fake-update-ratio", "teacher-guidance", "alarm-critic-lag", "num-steps-per-rollout"],
)  # fmt: skip
def test_flag_that_could_hold_only_one_value_is_not_there(name):
    assert not {f"--{role}-{name}" for role in dmd2.roles} & DMD2.keys()


def test_an_alias_is_the_same_flag():
    assert DMD2["--num-rollout"].alias == "--num-student-steps"
    assert parse_args(["--num-student-steps", "7"]).num_rollout == 7


def test_trainers_own_option_is_the_same_by_flag_and_by_preset(tmp_path):
    preset = tmp_path / "mine.yaml"
    preset.write_text("args: {num_student_steps: 9}\ntrainers: [{role: critic, overrides: {dm_shift: 2}}]\n")

    by_preset, by_flag = parse_args(["--config", str(preset)]), parse_args(["--critic-dm-shift", "2"])

    assert by_preset.trainers == by_flag.trainers
    assert by_preset.num_rollout == 9


def test_preset_that_gives_a_flag_under_both_names_is_refused(tmp_path):
    preset = tmp_path / "mine.yaml"
    preset.write_text("args: {num_student_steps: 9, num_rollout: 9}\n")

    with pytest.raises(ConfigError, match="num_rollout is there under two names"):
        parse_args(["--config", str(preset)])


@pytest.mark.parametrize("words", [["--dm-shift", "1"], ["--dm-shift", "7"]])
def test_value_of_the_run_that_every_trainer_overrides_is_refused(tmp_path, words):
    """The default, too: somebody has written it."""
    preset = tmp_path / "mine.yaml"
    preset.write_text("trainers: [{role: critic, overrides: {dm_shift: 3}}]\n")

    with pytest.raises(ConfigError, match=r"--dm-shift .*has its own \(critic 3.0\); pass --critic-dm-shift or"):
        parse_args(["--config", str(preset), *words])
    assert parse_args(["--config", str(preset), "--critic-dm-shift", "7"]).trainers[0].overrides == {"dm_shift": 7.0}


def test_value_that_one_trainer_overrides_is_the_others(tmp_path):
    preset = tmp_path / "mine.yaml"
    preset.write_text("trainers: [{role: critic, overrides: {lr: 3.0e-6}}]\n")

    assert parse_args(["--config", str(preset), "--lr", "1e-4"]).lr == 1e-4
    with pytest.raises(ConfigError, match=r"--lr 0.0001: every trainer that reads it has its own"):
        parse_args(["--config", str(preset), "--lr", "1e-4", "--actor-lr", "1e-5"])
