"""Layout of a prompt table: a safetensors file whose rows are written, and read, by their place in it.

The header is written first, since the family says how large a row is; rows follow in any order. No tensor is copied on
the way, and nothing but the rows asked for is read.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

FORMAT = "2"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}
_LARGEST_HEADER = 1 << 20
_PIECE = 1 << 20
"""Bytes that are checksummed at once."""


@dataclass(frozen=True, slots=True)
class Column:
    """One tensor of the file: [rows, *shape], its first byte at ``start``."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Layout:
    columns: Mapping[str, Column]
    num_rows: int
    about: Mapping[str, Any]
    """Metadata of the rows, from whoever wrote the file."""

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return max(column.start + self.num_rows * column.row_bytes for column in self.columns.values())

    @property
    def row_bytes(self) -> int:
        return sum(column.row_bytes for column in self.columns.values())

    def write(self, file: int, first: int, rows: Mapping[str, Tensor]) -> None:
        """Put ``rows`` into their places from row ``first`` on. Raises OSError."""
        for name, column in self.columns.items():
            data, place = _bytes(rows[name].contiguous()), column.start + first * column.row_bytes
            while data:
                written = os.pwrite(file, data, place)
                data, place = data[written:], place + written

    def read(self, file: int, rows: Sequence[int]) -> dict[str, Tensor]:
        """These rows, in this order. Raises OSError where the file ends before them."""
        found = {}
        for name, column in self.columns.items():
            values = torch.empty((len(rows), *column.shape), dtype=column.dtype)
            data = _bytes(values)
            for place, row in enumerate(rows):
                _fill(file, data[place * column.row_bytes :][: column.row_bytes], column.start + row * column.row_bytes)
            found[name] = values
        return found

    def checksum(self, file: int, rows: range) -> int:
        """CRC-32 of what the file holds as ``rows``. Raises OSError."""
        found = 0
        for column in self.columns.values():
            place, end = (column.start + row * column.row_bytes for row in (rows.start, rows.stop))
            while place < end:
                piece = bytearray(min(_PIECE, end - place))
                _fill(file, memoryview(piece), place)
                found, place = zlib.crc32(piece, found), place + len(piece)
        return found


def checksum(rows: Mapping[str, Tensor], names: Iterator[str] | Sequence[str]) -> int:
    """CRC-32 of rows in memory, by the order of ``names``: what ``Layout.checksum`` finds once they are written."""
    found = 0
    for name in names:
        found = zlib.crc32(_bytes(rows[name].contiguous()), found)
    return found


def new_layout(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, num_rows: int, about: Mapping[str, Any]
) -> tuple[bytes, Layout]:
    """The bytes that such a file begins with, and where its rows go."""
    code = next(code for code, known in _DTYPES.items() if known is dtype)
    entries: dict[str, Any] = {"__metadata__": {"format": FORMAT, "about": json.dumps(about, sort_keys=True)}}
    end = 0
    for name, shape in sorted(shapes.items()):
        start, end = end, end + num_rows * math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": code, "shape": [num_rows, *shape], "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight bytes, as safetensors writes them
    head = struct.pack("<Q", len(text)) + text
    return head, _parsed(text, len(head))


def read_layout(file: int) -> Layout:
    """The layout of a whole table. Raises ValueError for anything else: a part of one, or another format."""
    try:
        (length,) = struct.unpack("<Q", os.pread(file, 8, 0))
        if length > _LARGEST_HEADER:
            raise ValueError(f"its header has {length} bytes")
        layout = _parsed(os.pread(file, length, 8), 8 + length)
    except (struct.error, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it has no header ({type(error).__name__})") from error
    if (size := os.fstat(file).st_size) != layout.size:
        raise ValueError(f"it has {size} bytes, and its header describes {layout.size}")
    return layout


def _parsed(text: bytes, start: int) -> Layout:
    entries = json.loads(text)
    metadata = entries.pop("__metadata__")
    if metadata["format"] != FORMAT:
        raise ValueError(f"it has format {metadata['format']!r}, and this version reads {FORMAT!r}")
    columns = {
        name: Column(_DTYPES[entry["dtype"]], tuple(entry["shape"][1:]), start + entry["data_offsets"][0])
        for name, entry in entries.items()
    }
    (num_rows,) = {entry["shape"][0] for entry in entries.values()}
    return Layout(columns, num_rows, json.loads(metadata["about"]))


def _bytes(tensor: Tensor) -> memoryview:
    """The tensor's own memory: NumPy has no bfloat16, so it is looked at as bytes."""
    found: np.ndarray[Any, np.dtype[np.uint8]] = tensor.reshape(-1).view(torch.uint8).numpy()
    return found.data


def _fill(file: int, into: memoryview, place: int) -> None:
    while into:
        read = os.preadv(file, [into], place)
        if read == 0:
            raise OSError(f"the file ends at byte {place}")
        into, place = into[read:], place + read
