"""Shape checks and broadcasting of noise levels over samples."""

import torch
from torch import Tensor


def level_of(sigma: Tensor | float, x: Tensor) -> Tensor:
    """``sigma`` as fp32 that broadcasts over ``x`` [B, ...]: [B] goes along the batch, never along the last axis."""
    level = torch.as_tensor(sigma, device=x.device).float()
    if level.ndim == 1 and level.shape[0] in (1, *x.shape[:1]):
        return level.reshape(-1, *[1] * (x.ndim - 1))
    if level.ndim == 0:
        return level
    fits = level.ndim == x.ndim and all(one in (1, full) for one, full in zip(level.shape, x.shape, strict=True))
    if not fits:
        raise ValueError(f"a level of shape {tuple(level.shape)} does not fit {tuple(x.shape)}; give [B] or a number")
    return level


def same_shape(**tensors: Tensor) -> None:
    """Raises ValueError, naming each tensor with its shape, unless all shapes are equal."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) != 1:
        raise ValueError(f"shapes differ: {', '.join(f'{name} {shape}' for name, shape in shapes.items())}")
