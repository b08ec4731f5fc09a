"""Noise levels of a few-step sampler: equally spaced, then shifted."""

from __future__ import annotations

import math

from miles_dmd.errors import ConfigError
from miles_dmd.validators import count


def shifted(u: float, shift: float) -> float:
    """s u / (1 + (s - 1) u): the timestep shift of SD3 (arXiv 2403.03206, eq. 23), on [0, 1]; 1 changes nothing."""
    if isinstance(shift, bool) or not isinstance(shift, int | float) or not (math.isfinite(shift) and shift > 0):
        raise ConfigError(f"--shift {shift!r} must be a finite number above 0; SD3 uses 3.0, and 1.0 is no shift")
    return shift * u / (1 + (shift - 1) * u)


def sigma_grid(num_steps: int, shift: float) -> tuple[float, ...]:
    """``num_steps`` sigmas from 1 down, equally spaced and then shifted once; (1, .9, .75, .5) for 4 and 3.0.

    The final 0 is left out: it is where the last step arrives, not where the network is asked.
    """
    count("--num-inference-steps", num_steps, 1)
    return tuple(shifted((num_steps - i) / num_steps, shift) for i in range(num_steps))
