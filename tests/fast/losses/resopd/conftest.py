"""Refusals of on-policy distillation at the door."""

import pytest

from miles_dmd.config.cli import parse_args
from miles_dmd.errors import ConfigError
from miles_dmd.losses.resopd import loss_type


def _at_the_door(words):
    args = parse_args(words)
    loss_type.plan(args)
    loss_type.check(args)


@pytest.fixture
def refused():
    """The one line with which flags are refused: by the command line, the plan or the loss type's own rules."""

    def ask(*flags):
        with pytest.raises(ConfigError) as error:
            _at_the_door(["--loss-type", "resopd", *flags])
        assert "\n" not in str(error.value)
        return str(error.value)

    return ask
