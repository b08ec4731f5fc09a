"""Buckets: tensors packed into dictionaries of bounded size, as weights travel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

BUCKET_BYTES = 256 << 20
"""Most that is gathered, sent or read at once; a single larger tensor makes a bucket of its own."""


def packed(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Named tensors in their order, a bucket in memory at a time."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, value in tensors:
        if bucket and size + value.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = value
        size += value.nbytes
    if bucket:
        yield bucket
