"""Tables as text: a title, rows in columns, and a note."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from miles_dmd.shown import aligned, printable


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    rows: Sequence[Sequence[str]]
    """The first is the header, where there is one."""
    note: str = ""

    def __str__(self) -> str:
        lines = aligned([printable(cell) for cell in row] for row in self.rows)
        return "\n".join([self.title, *lines, *([f"  {self.note}"] if self.note else [])])
