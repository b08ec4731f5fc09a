"""miles_dmd: distil a flow-matching teacher into a few-step student with trainer groups over FSDP2."""

from typing import Any

from miles_dmd.version import VERSION as __version__

__all__ = ["DistillationTrainer", "__version__"]


def __getattr__(name: str) -> Any:
    """``DistillationTrainer`` is imported when it is asked for: the rest of the package does not need it."""
    if name == "DistillationTrainer":
        from miles_dmd.run import DistillationTrainer

        return DistillationTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
