"""Tensor serialisation between actors: numpy arrays, which Ray transfers out of band.

Torch would pickle each tensor as a file.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import ray.util
import torch
from torch import Tensor

Flat = tuple[np.ndarray[Any, Any], torch.dtype, torch.Size]


def send_tensors_as_arrays() -> None:
    """Concerns what this process sends; who receives needs no such call."""
    ray.util.register_serializer(Tensor, serializer=flat, deserializer=unflat)


def flat(value: Tensor) -> Flat:
    """Its bytes, for any dtype; a tensor on a device, or one that wants a gradient, comes to the CPU without it."""
    # flattened before its dtype changes: a view with elements of another size needs a last dimension to stretch
    return value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy(), value.dtype, value.shape


def unflat(sent: Flat) -> Tensor:
    """Shares memory with the array, which Ray keeps read-only: torch does not know that, so never write to it."""
    array, dtype, shape = sent
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that very warning
        return torch.from_numpy(array).view(dtype).reshape(shape)
