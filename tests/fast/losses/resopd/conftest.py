"""Directories of language models as the door sees them: a configuration and a tokenizer."""

import json

import pytest

from miles_dmd.config.cli import parse_args
from miles_dmd.errors import ConfigError
from miles_dmd.losses.resopd import loss_type


@pytest.fixture
def model_directory(tmp_path):
    """Writes config.json, and a tokenizer.json if there is a ``vocab``."""

    def write(name, *, vocab=None, added=(), **config):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 32, **config}))
        if vocab is not None:
            added = [{"content": token, "id": number} for token, number in added]
            content = {"model": {"type": "BPE", "vocab": vocab}, "added_tokens": added}
            (directory / "tokenizer.json").write_text(json.dumps(content))
        return str(directory)

    return write


@pytest.fixture
def refused():
    """The one line with which flags are refused: by the command line, the plan or the loss type's own rules."""

    def ask(*flags):
        with pytest.raises(ConfigError) as error:
            args = parse_args(["--loss-type", "resopd", *flags])
            loss_type.plan(args)
            loss_type.check(args)
        assert "\n" not in str(error.value)
        return str(error.value)

    return ask
