"""Counters of this server worker: forwards, samples, weight updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

COUNTERS = {"forwards": 0, "updates": 0}
"""Calls of the denoising network, and weight updates that succeeded. A server that was restarted begins at 0 again."""


def around_forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    COUNTERS["forwards"] += 1
    return original(*args, **kwargs)


def around_update(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = original(*args, **kwargs)
    COUNTERS["updates"] += int(bool(result[0]))
    return result
