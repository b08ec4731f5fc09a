"""Args: documented, frozen, and of one piece with its loss type."""

import dataclasses

import pytest

from miles_dmd.config.args import GROUPS, Args
from miles_dmd.config.flags import docstrings
from miles_dmd.config.values import checked, kinds
from miles_dmd.errors import ConfigError, NotFound
from miles_dmd.losses.dmd2 import Options


@pytest.mark.parametrize("group", GROUPS.values())
def test_every_argument_has_words_under_it(group):
    words = docstrings(group)

    assert [row.name for row in dataclasses.fields(group) if not words.get(row.name, "").endswith(".")] == []


def test_every_default_is_of_its_own_kind():
    args = Args()

    assert {name: checked(kind, getattr(args, name), name) for name, kind in kinds(Args).items()} == {
        name: getattr(args, name) for name in kinds(Args)
    }


def test_groups_hold_every_argument_once():
    names = [row.name for group in GROUPS.values() for row in dataclasses.fields(group)]

    assert sorted(names) == sorted(kinds(Args))


def test_args_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Args().lr = 1.0


def test_the_teacher_is_the_checkpoint_unless_it_is_named():
    assert Args(hf_checkpoint="a").teacher_path == "a"
    assert Args(hf_checkpoint="a", teacher_checkpoint="b").teacher_path == "b"


def test_a_loss_types_defaults_stand_in_for_its_options():
    assert Args().loss_options == Options()


def test_options_of_another_loss_type_are_refused(own_loss):
    with pytest.raises(ConfigError, match=r"--loss-type other\.loss reads .*Options, not a Options"):
        dataclasses.replace(Args(), loss_type=own_loss("other"))


def test_an_unknown_loss_type_is_refused():
    with pytest.raises(NotFound, match="--loss-type 'dmd7'"):
        Args(loss_type="dmd7")
