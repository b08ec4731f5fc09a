"""Stand-ins for CUDA attributes in a CPU build of torch. Patches torch, never sglang."""

from __future__ import annotations

from typing import Any

_kept: list[Any] = []
"""Libraries live as long as they are referred to."""


def prepare() -> None:
    """Call before anything imports torchvision or sglang. Does nothing where torch has CUDA."""
    import torch

    if torch.cuda.is_available():
        return
    _declare_torchvision_ops(torch)
    # the server's memory controller calls these two whatever the device is
    torch.cuda.synchronize = lambda device=None: None
    torch.cpu.empty_cache = lambda: None


def _declare_torchvision_ops(torch: Any) -> None:
    """PyPI's torchvision is built for CUDA: its operators cannot load, and its import fails without these two."""
    if hasattr(torch.ops.torchvision, "nms"):
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)
