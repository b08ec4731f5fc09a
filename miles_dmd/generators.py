"""Global random generators of a process, Python's, numpy's and torch's: seeded, saved and restored.

What this project draws has seeds of its own (``seeds``). A plug-in, or a library that it uses, may draw from these.
"""

from __future__ import annotations

import base64
import random
import sys
from collections.abc import Mapping
from typing import Any

from miles_dmd.seeds import derive

FORMAT = 1


def seed_globals(run_seed: int, *process: str | int) -> None:
    """Seed them from --seed and the name of the process, so that ranks draw different numbers.

    Torch's where it is imported: the driver of a Ray run has none.
    """
    import numpy as np

    random.seed(derive(run_seed, "python", *process))
    np.random.seed(derive(run_seed, "numpy", *process) % 2**32)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(derive(run_seed, "torch", *process))  # all devices' too


def random_state() -> dict[str, Any]:
    """State of the global generators of this process, as JSON takes it."""
    import numpy as np

    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "format": FORMAT,
        "python": [version, list(words), gauss],
        "numpy": [str(name), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
    }
    if (torch := sys.modules.get("torch")) is not None:
        state["torch"] = _text(torch.get_rng_state())
        if torch.cuda.is_available():
            state["cuda"] = _text(torch.cuda.get_rng_state())
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Raises what the generators raise at a state that is none."""
    import numpy as np

    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    if (torch := sys.modules.get("torch")) is not None and "torch" in state:
        torch.set_rng_state(_bytes(torch, state["torch"]))
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(_bytes(torch, state["cuda"]))


def _text(state: Any) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _bytes(torch: Any, text: str) -> Any:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
