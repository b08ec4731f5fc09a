"""Sigma schedule for SGLang: a scheduler of ours, because no request can name sigmas. Knows no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from miles_dmd.errors import EngineMisanswer
from miles_dmd.files import atomic_write_text

TOLERANCE = 1e-5
"""Between sigmas computed in fp32 there and in fp64 here."""


def scheduler_directory(args: Any) -> Path:
    """Written below --cache-dir. Its last part must be called so: SGLang reads the configuration's name off it."""
    directory = Path(args.cache_dir) / "sglang" / f"shift_{args.shift:g}" / "scheduler"
    directory.mkdir(parents=True, exist_ok=True)
    content = {
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "num_train_timesteps": 1000,
        "shift": args.shift,
        # linspace(1, 0, N+1) without its end, then shifted once; without it the last of 4 sigmas would be 0.009
        "use_uniform_sigmas": True,
    }
    atomic_write_text(directory / "scheduler_config.json", json.dumps(content, indent=2) + "\n")
    return directory


def check_grid(found: Sequence[float], expected: Sequence[float], server: str, cure: str) -> None:
    """``found`` ends with the 0 at which the last step arrives. Raises EngineMisanswer."""
    wanted = (*expected, 0.0)
    if len(found) == len(wanted) and all(abs(a - b) <= TOLERANCE for a, b in zip(found, wanted, strict=True)):
        return
    shown = ", ".join(f"{sigma:.4g}" for sigma in found)
    raise EngineMisanswer(
        f"{server} samples at sigmas {shown}; the run wants {', '.join(f'{sigma:.4g}' for sigma in wanted)}: {cure}"
    )
