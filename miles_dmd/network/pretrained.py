"""Networks from checkpoints, without ever holding a second copy in memory."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import init_empty_weights, load_checkpoint_in_model
from torch import nn

from miles_dmd.config.checkpoints import weight_entry
from miles_dmd.contracts.family import ModelFamily
from miles_dmd.errors import ConfigError


def empty_network(family: ModelFamily, checkpoint: Path) -> nn.Module:
    """The network of a pipeline directory with parameters on the meta device; buffers are real."""
    with init_empty_weights(include_buffers=False):
        network = family.code().build_network(checkpoint)
    # no network here has dropout or batch statistics to train, and a family that has must not train them by accident
    return network.eval()


def load_network(family: ModelFamily, checkpoint: Path, *, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The network with its weights, on the CPU in ``dtype``."""
    network = empty_network(family, checkpoint)
    weights = weight_entry(checkpoint / family.network_component)
    # without a device map, accelerate leaves parameters in the dtype of the file
    load_checkpoint_in_model(network, str(weights), device_map={"": "cpu"}, dtype=dtype)
    missing = [name for name, value in network.named_parameters() if value.is_meta]
    if missing:
        raise ConfigError(
            f"{checkpoint / family.network_component} lacks weights for {missing[:4]} ({len(missing)} in all)"
        )
    return network
