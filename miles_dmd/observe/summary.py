"""summary.json and the tables at the end of a run."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_dmd.files import atomic_write_text

if TYPE_CHECKING:
    from rich.console import Console

FORMAT = 1
_PLAIN_WIDTH = 120


def write_summary(path: str | Path, summary: Mapping[str, Any]) -> None:
    """``summary`` as indented strict JSON with its ``format``, whole or absent; a number that is not finite is null.

    Raises TypeError for a value that JSON does not know.
    """
    text = json.dumps(_strict({"format": FORMAT, **summary}), indent=2, allow_nan=False, ensure_ascii=False)
    atomic_write_text(path, text + "\n")


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], console: "Console | None" = None
) -> None:
    """Print a table. Columns of which every cell is a number, or a number and a unit, are set to the right."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    drawn = Table(title=title or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    drawn.show_edge = drawn.pad_edge = False
    for index, name in enumerate(columns):
        numeric = bool(rows) and all(_is_quantity(row[index]) for row in rows)
        drawn.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(str(cell)) for cell in row))  # Text: a "[B, C]" in a cell is no markup
    console = console or _console()
    console.print(drawn)
    console.print()


def time_rows(totals: Mapping[str, float]) -> list[tuple[str, str, str]]:
    """(phase, seconds, share) of SpanLog.totals, with a last row for the sum; for ``table``."""
    wall = math.fsum(totals.values())
    rows = [(name, f"{seconds:.1f} s", _share(seconds, wall)) for name, seconds in totals.items()]
    return [*rows, ("total", f"{wall:.1f} s", _share(wall, wall))]


def memory_rows(peaks: Mapping[str, float]) -> list[tuple[str, str]]:
    """(group, peak) from bytes by group; for ``table``."""
    return [(group, byte_size(peak)) for group, peak in peaks.items()]


def byte_size(count: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole > 0 else "0.0 %"


def _is_quantity(cell: object) -> bool:
    if isinstance(cell, int | float):
        return True
    first, *unit = str(cell).split(" ")
    try:
        float(first)
    except ValueError:
        return False
    return len(unit) <= 1


def _console() -> "Console":
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PLAIN_WIDTH)


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _strict(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
