"""Device, collective backend, dtype and threads of a process."""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass
from typing import Literal

import torch

from miles_dmd.errors import ConfigError

KEPT_BYTES = 256 << 20
LARGEST_KEPT_BYTES = 32 << 20
"""The most that glibc takes: larger pieces go back to the system as they are freed."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Compute:
    device: torch.device
    backend: Literal["gloo", "nccl"]
    dtype: torch.dtype
    """Dtype of the networks' forward and backward; master weights, reductions and losses are fp32 always."""


def choose_compute(device: str, compute_dtype: str, *, local_rank: int = 0) -> Compute:
    """``device`` is auto, cpu or cuda; auto takes CUDA where there is some."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: this machine shows no CUDA device; pass --device auto or cpu")
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        return Compute(torch.device("cuda", local_rank), "nccl", DTYPES[compute_dtype])
    return Compute(torch.device("cpu"), "gloo", DTYPES[compute_dtype])


def prepare_process(threads: int) -> None:
    """Set torch's threads and glibc's allocator.

    One thread a CPU rank unless asked: two on a busy 2-core machine measured 10 to 20 times slower.
    """
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    _keep_freed_memory()


def _keep_freed_memory() -> None:
    """Let glibc keep what this process frees instead of giving it back: a step on the CPU frees and wants the same
    memory thousands of times, and each page that comes anew is cleared first, a tenth of the time. Elsewhere: nothing.
    """
    trim, mmap = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(trim, KEPT_BYTES)
        libc.mallopt(mmap, LARGEST_KEPT_BYTES)


def release_cached_memory() -> None:
    """Give back what torch keeps of the device beside its live tensors: others share it. Nothing to do on a CPU."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of this process since its start: device memory on CUDA, resident memory on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
