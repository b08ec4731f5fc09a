"""Flags: those that the run, its loss type and its trainers declare, and no others."""

import dataclasses

import pytest

from miles_dmd.config.cli import parser_of
from miles_dmd.config.flags import Given, docstrings, flag_name, flags_of
from miles_dmd.errors import ConfigError
from miles_dmd.losses.dmd2 import loss_type as dmd2
from miles_dmd.registry import load

DMD2 = flags_of("dmd2", dmd2.options, dmd2.roles)


def test_under_dmd2_only_declared_teacher_flags_exist():
    teacher = {name for name in DMD2 if name.startswith("--teacher-")}

    declared = {flag_name(row.name) for row in dataclasses.fields(dmd2.options) if row.name.startswith("teacher_")}
    assert teacher == {"--teacher-checkpoint"} | declared


def test_every_trainer_may_read_its_own_model_and_optimizer_arguments():
    assert {"--critic-lr", "--actor-lr", "--critic-hf-checkpoint", "--actor-micro-batch-size"} <= set(DMD2)
    assert not {"--critic-rollout-batch-size", "--critic-seed", "--critic-loss-type"} & set(DMD2)


def test_a_loss_type_brings_flags_without_a_change_to_the_command_line(own_loss):
    loss_type = load("losses", own_loss("lab", ("actor",), "margin: float = 0.5\n    '''Room to the teacher.'''"))

    flags = flags_of("lab.loss", loss_type.options, loss_type.roles)

    assert (flags["--margin"].default, flags["--margin"].words) == (0.5, "Room to the teacher.")
    assert "--critic-lr" not in flags


def test_a_loss_type_may_not_declare_a_flag_that_every_run_has(own_loss):
    loss_type = load("losses", own_loss("clash", ("actor",), "lr: float = 0.5"))

    with pytest.raises(ConfigError, match="--loss-type clash declares --lr"):
        flags_of("clash", loss_type.options, loss_type.roles)


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
