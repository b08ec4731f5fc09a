"""Plugin for SGLang's language-model server: seeds of requests, SHA-256 of weights on every device."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any

BATCH = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
HASH = "sglang.srt.utils.weight_checker._hash_tensor"


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(BATCH, around_batch, HookType.AROUND)
    HookRegistry.register(HASH, sha256, HookType.REPLACE)


def around_batch(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Obey each request's ``sampling_seed``, which stock sglang does with its batch-invariant kernels alone.

    A number is then a function of seed, position and token. Not with other backends than pytorch's, which refuse seeds.
    """
    import torch
    from sglang.srt.runtime_context import get_exec

    info, batch = original(*args, **kwargs), kwargs.get("batch", args[-2])
    if info.sampling_seed is None and get_exec().kernel.sampling_backend == "pytorch":
        info.sampling_seed = torch.tensor([seed_of(request) for request in batch.reqs], device=info.temperatures.device)
    return info


def seed_of(request: Any) -> int:
    """A request that names none draws one, and keeps it: it may be put into a batch again."""
    if request.sampling_params.sampling_seed is None:
        request.sampling_params.sampling_seed = random.getrandbits(62)
    return int(request.sampling_params.sampling_seed)


def sha256(value: Any) -> str:
    """Of a tensor's bytes. On a GPU, stock sglang has a hash of its own, which nobody else can compute."""
    import torch

    data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data.tobytes()).hexdigest()
