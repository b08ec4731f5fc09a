"""Refusals of on-policy distillation, and configurations of language models that the door reads."""

import json

import pytest

from miles_dmd.config.cli import parse_args
from miles_dmd.errors import ConfigError
from miles_dmd.losses.resopd import loss_type


@pytest.fixture
def model_directory(tmp_path):
    """Writes the config.json of a model of some vocabulary."""

    def write(name, vocab_size=32):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": vocab_size}))
        return str(directory)

    return write


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
