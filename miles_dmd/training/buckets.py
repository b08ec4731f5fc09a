"""Packing of named tensors into buckets of bounded size: what is gathered, sent, read or written at once."""

from __future__ import annotations

from collections.abc import Mapping

BUCKET_BYTES = 256 << 20
"""Bytes of full weights that are in memory at once on their way from one process, or file, to another."""


def pack(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """The names of ``sizes`` in order, in lists of at most ``limit`` bytes together; a larger tensor has its own."""
    buckets: list[list[str]] = []
    room = -1
    for name, size in sizes.items():
        if size > room:
            buckets.append([])
            room = limit
        buckets[-1].append(name)
        room -= size
    return buckets
