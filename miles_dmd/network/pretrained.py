"""Loading of networks from pipeline directories, without a second copy in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from accelerate import init_empty_weights, load_checkpoint_in_model
from torch import nn

from miles_dmd.contracts.family import ModelFamily
from miles_dmd.errors import ConfigError, MilesDmdError
from miles_dmd.pipelines.weights import weight_entry


@contextlib.contextmanager
def opening(what: str, directory: Path) -> Iterator[None]:
    """Turn what libraries raise about a pipeline directory into one line, a ConfigError: they read more than the door.

    Memory that does not suffice, or a device that fails, is no fault of the directory's, and goes on as it is.
    """
    try:
        yield
    except (MilesDmdError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:
        raise ConfigError(
            f"{directory}: {what} cannot be opened ({type(error).__name__}: {error}); download the pipeline again, "
            "or name another"
        ) from error


def empty_network(family: ModelFamily, directory: Path) -> nn.Module:
    """The network of a pipeline directory with parameters on the meta device; buffers are real."""
    with opening(f"its {family.network_component}", directory), init_empty_weights(include_buffers=False):
        network = family.code().build_network(directory)
    _tie(network)  # in there, each name would get a parameter of its own again
    # no network here has dropout or batch statistics to train, and a family that has must not train them by accident
    return network.eval()


def load_network(family: ModelFamily, directory: Path, *, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The network with its weights, on the CPU in ``dtype``."""
    network = empty_network(family, directory)
    weights = weight_entry(directory / family.network_component)
    # without a device map, accelerate leaves parameters in the dtype of the file
    with opening(f"the weights of its {family.network_component}", directory):
        load_checkpoint_in_model(network, str(weights), device_map={"": "cpu"}, dtype=dtype)
        _tie(network)  # loading has put a tensor of its own at each name
    missing = [name for name, value in network.named_parameters() if value.is_meta]
    if missing:
        raise ConfigError(
            f"{directory / family.network_component} lacks weights for {missing[:4]} ({len(missing)} in all)"
        )
    return network


def _tie(network: nn.Module) -> None:
    """Make parameters that stand for one another one: files have a tensor of the first alone."""
    if (tie := getattr(network, "tie_weights", None)) is not None:
        tie()
