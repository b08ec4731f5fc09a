"""Short printable representation of any value, of sizes and of tables, for messages."""

import os
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any

LONGEST_VALUE = 80
LONGEST_MESSAGE = 1200
"""A message names a path or two and a cure; what is longer is cut in its middle, where the long value stands."""


def printable(text: str, longest: int = LONGEST_MESSAGE) -> str:
    """``text`` on one line: what a terminal would obey instead of showing it (escapes, surrogates) is written out."""
    if len(text) > longest:
        text = f"{text[: longest * 2 // 3]} ... {text[-(longest // 3) :]}"
    return "".join(character if character.isprintable() else _escaped(character) for character in text)


def short_repr(value: Any) -> str:
    """``repr`` of a value, cut to LONGEST_VALUE characters; nothing larger than the cut is made on the way."""
    text = _REPR.repr(value)
    return printable(text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}...")


def _escaped(character: str) -> str:
    return " " if character in "\r\n\t" else character.encode("unicode_escape", "surrogatepass").decode()


class _Repr(reprlib.Repr):
    """reprlib's, bounded in depth and width, also for whole numbers that Python refuses to write out."""

    def repr_int(self, x: int, level: int) -> str:
        digits = int(x.bit_length() * 0.30103) + 1
        return repr(x) if digits <= LONGEST_VALUE else f"<a number of {digits} digits>"

    def repr_str(self, x: str, level: int) -> str:
        return repr(x[: LONGEST_VALUE + 1])

    repr_bytes = repr_str  # type: ignore[assignment]


_REPR = _Repr()
_REPR.maxlevel, _REPR.maxother = 3, LONGEST_VALUE + 1


def byte_size(count: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """A line for each row, its cells in columns; two spaces before each."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["".join(f"  {cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def with_tilde(path: str) -> str:
    """``path`` with ``~`` for the user's home, as one types it."""
    home = os.path.expanduser("~")
    return "~" + path.removeprefix(home) if path == home or path.startswith(home.rstrip("/") + "/") else path
