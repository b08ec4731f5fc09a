"""Timestep shift, its inverse, and draws of noise levels within bounds.

S(u) = k u / (1 + (k - 1) u), Esser et al. 2024 (arXiv 2403.03206), eq. 23 with k = sqrt(m / n): larger pictures need
more noise to hide the same.
"""

import math

import torch
from torch import Tensor


def shift_sigma(u: Tensor, shift: float) -> Tensor:
    """Shape of ``u``, fp32: S(u) = k u / (1 + (k - 1) u), for ``u`` in [0, 1] and k = ``shift``; S(0) = 0, S(1) = 1.

    Raises ValueError unless 1 <= shift < inf. Esser et al. 2024, eq. 23.
    """
    k, u = _checked(shift), u.float()
    return k * u / (1 + (k - 1) * u)


def unshift_sigma(sigma: Tensor, shift: float) -> Tensor:
    """Shape of ``sigma``, fp32: S^-1(sigma) = sigma / (k - (k - 1) sigma), the inverse of shift_sigma.

    Raises ValueError unless 1 <= shift < inf. Esser et al. 2024, eq. 23, solved for u.
    """
    k, sigma = _checked(shift), sigma.float()
    return sigma / (k - (k - 1) * sigma)


def timestep_shift(t: Tensor, shift: float, num_train_timesteps: float) -> Tensor:
    """Shape of ``t``, fp32: T k f / (1 + (k - 1) f) with f = t / T, for ``t`` in [0, T].

    T = ``num_train_timesteps`` is the model's own, not always 1000.
    Raises ValueError unless 1 <= shift < inf and 0 < num_train_timesteps < inf. Esser et al. 2024, eq. 23.
    """
    if not (math.isfinite(num_train_timesteps) and num_train_timesteps > 0):
        raise ValueError(f"num_train_timesteps must be positive and finite, got {num_train_timesteps}")
    return num_train_timesteps * shift_sigma(t.float() / num_train_timesteps, shift)


def truncated_shifted_sigma(u: Tensor, low: float, high: float, shift: float) -> Tensor:
    """Shape of ``u``, fp32, in (low, high): S of ``u`` stretched from [0, 1) over [S^-1(low), S^-1(high)].

    ``u`` is uniform; the result follows the law of S(uniform) given that it lies within the bounds. Clamping to them
    instead would put 5.8 % of all draws exactly on 0.98 at shift 3.
    Raises ValueError unless 0 <= low < high <= 1, 1 <= shift < inf and ``u`` in [0, 1]. DMD2 draws within its interval.
    """
    if not 0 <= low < high <= 1:
        raise ValueError(f"sigma bounds must satisfy 0 <= low < high <= 1, got low={low}, high={high}")
    if not ((u >= 0) & (u <= 1)).all():
        raise ValueError("u must lie in [0, 1): draw it with torch.rand")
    k = _checked(shift)
    first, last = (bound / (k - (k - 1) * bound) for bound in (low, high))
    sigma = shift_sigma(first + (last - first) * u.float(), k)
    # rounding to fp32 may reach a bound: one step of the last digit keeps the interval open
    bounds = torch.tensor([low, high], dtype=torch.float32, device=u.device)
    inside = torch.nextafter(bounds, bounds.flip(0))
    return sigma.clamp(inside[0], inside[1])


def _checked(shift: float) -> float:
    if not (math.isfinite(shift) and shift >= 1):
        raise ValueError(f"shift must be a finite number of at least 1, got {shift}")
    return float(shift)
