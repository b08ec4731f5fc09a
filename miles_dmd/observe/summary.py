"""summary.json and the tables at the end of a run."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_dmd.files import atomic_write_text
from miles_dmd.observe.tables import Table
from miles_dmd.shown import byte_size

FORMAT = 1


def write_summary(path: str | Path, summary: Mapping[str, Any]) -> None:
    """``summary`` as indented strict JSON with its ``format``, whole or absent; a number that is not finite is null.

    Raises TypeError for a value that JSON does not know.
    """
    text = json.dumps(_strict({"format": FORMAT, **summary}), indent=2, allow_nan=False, ensure_ascii=False)
    atomic_write_text(path, text + "\n")


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table and an empty line."""
    print(Table(title, [columns, *rows]), end="\n\n")


def time_rows(totals: Mapping[str, float]) -> list[tuple[str, str, str]]:
    """(phase, seconds, share) of SpanLog.totals, with a last row for the sum; for ``table``."""
    wall = math.fsum(totals.values())
    rows = [*totals.items(), ("total", wall)]
    width = len(f"{wall:.1f}")
    return [(name, f"{seconds:{width}.1f} s", _share(seconds, wall)) for name, seconds in rows]


def memory_rows(peaks: Mapping[str, float]) -> list[tuple[str, str]]:
    """(group, peak) from bytes by group; for ``table``."""
    return [(group, byte_size(peak)) for group, peak in peaks.items()]


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole if whole > 0 else 0:5.1f} %"


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _strict(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
