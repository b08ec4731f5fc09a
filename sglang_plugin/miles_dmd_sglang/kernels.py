"""Stand-in for sgl_kernel, whose CPU build is on no index: names resolve, and the hash of seeds is written in torch."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import types
from typing import Any

_kept: list[Any] = []
"""Libraries live as long as they are referred to."""
WORD = 0xFFFFFFFF


class _Stub(types.ModuleType):
    __version__ = "0.4.10"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(f"sgl_kernel.{name} has no CPU version here")

        return missing


def prepare() -> None:
    """Call before anything imports sglang. Does nothing where torch has CUDA, or where sgl_kernel is there."""
    import torch

    if torch.cuda.is_available():
        return
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    if importlib.util.find_spec("sgl_kernel") is not None:
        return
    stub = _Stub("sgl_kernel")
    stub.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None)
    sys.modules["sgl_kernel"] = stub
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
    library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
    _kept.append(library)


def murmur_hash32(seed: Any, positions: Any, columns: Any) -> Any:
    """[N, M] int64 below 2^32: MurmurHash3 of the words (seed's lower half, its upper half, position, column).

    In int64, whose products overflow above the 32 bits that are kept. The same numbers as sglang's Triton kernel.
    """
    import torch

    seed = seed.view(torch.int64) if seed.dtype == torch.uint64 else seed.long()
    words = (seed, seed >> 32, positions.long())
    state = torch.zeros_like(seed)[:, None]
    for word in words:
        state = _mix(state, word[:, None] & WORD)
    state = _mix(state, columns.long()[None] & WORD) ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        state = ((state ^ (state >> shift)) * factor) & WORD
    return state


def _mix(state: Any, word: Any) -> Any:
    word = (_rotate((word * 0xCC9E2D51) & WORD, 15) * 0x1B873593) & WORD
    return (_rotate(state ^ word, 13) * 5 + 0xE6546B64) & WORD


def _rotate(value: Any, by: int) -> Any:
    return ((value << by) | (value >> (32 - by))) & WORD
