"""Library errors about a pipeline directory in one line; other errors left alone."""

from pathlib import Path

import pytest
import torch

from miles_dmd.errors import ConfigError, EngineError
from miles_dmd.network.pretrained import opening


def test_what_a_library_raises_is_one_line_with_the_checkpoint():
    with (
        pytest.raises(
            ConfigError, match=r"^/models/x: its vae cannot be opened \(ValueError: no such act_fn\); download"
        ),
        opening("its vae", Path("/models/x")),
    ):
        raise ValueError("no such\nact_fn")


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError(), KeyboardInterrupt(), EngineError("mine")])
def test_what_is_no_fault_of_the_checkpoint_goes_on(error):
    with pytest.raises(type(error)), opening("its vae", Path("/models/x")):
        raise error
