"""metrics.jsonl: one JSON object per committed cycle, and running statistics.

    {"format": 1, "kind": "miles_dmd.metrics"}
    {"cycle": 1, "global_step": 0, "seconds": 1.2, "critic/loss": 0.31, "critic/loss.0": 0.35, ...}

Strict JSON has no NaN: a number that is not finite is written as null and read back as NaN.
"""

import json
import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_dmd.errors import FormatError

FORMAT = 1
KIND = "miles_dmd.metrics"
OF_A_CYCLE = ("cycle", "global_step", "seconds")
OF_EVERY_STEP = ("loss", "weight", "nonfinite", "seconds", "peak_memory_mib")
"""Metrics of every trainer group in a phase in which it trains, whatever it minimises."""
OF_EVERY_ROLE = ("grad_norm", "lr")
"""Metrics of every trained role's optimizer step."""

logger = logging.getLogger(__name__)


class MetricsWriter:
    """Appends rows to a metrics file; each is handed to the system at once, so kill -9 costs at most a torn last line.

    A file that is there is continued: its torn last line is cut off first, and the first row that repeats a cycle (of a
    run that goes on from a checkpoint) takes the place of that cycle's and all later ones, in one step. Raises
    FormatError for a file of another kind.

    The rows are data, and a full disk loses none: what cannot be written waits, with one warning, and is written with
    the next row or by ``sync``.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            _cut_torn_line(self.path)
        fresh = not self.path.exists() or self.path.stat().st_size == 0
        rows = [] if fresh else read_metrics(self.path)
        self._last = rows[-1]["cycle"] if rows else 0
        self._file = self.path.open("ab", buffering=0)
        self._waiting = bytearray()
        self._late = False
        if fresh:
            self._append({"format": FORMAT, "kind": KIND})

    def write(self, row: Mapping[str, float]) -> None:
        """``row`` needs a whole number ``cycle``; its values are numbers. Raises ValueError for a row without one."""
        if type(row.get("cycle")) is not int:
            raise ValueError(f"a row of metrics needs its cycle, a whole number; got {row.get('cycle')!r}")
        if row["cycle"] <= self._last:
            self._drop_from(int(row["cycle"]))
        self._last = row["cycle"]
        self._append({name: _as_json(value) for name, value in row.items()})

    def sync(self) -> None:
        """All rows are on the disk. Raises OSError where they cannot be."""
        self._flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Raises OSError where rows are lost: that of a disk which is still full."""
        if self._file.closed:
            return
        try:
            self.sync()
        finally:
            self._file.close()

    def _append(self, record: Mapping[str, Any]) -> None:
        self._waiting += json.dumps(record, allow_nan=False).encode() + b"\n"
        try:
            self._flush()
        except OSError as full:
            if not self._late:
                logger.warning("%s: rows wait in memory until they can be written (%s)", self.path, full.strerror)
            self._late = True

    def _flush(self) -> None:
        while self._waiting:
            # a disk that is nearly full takes a part; the rest follows it, so no row is torn in the end
            del self._waiting[: self._file.write(self._waiting)]
        self._late = False

    def _drop_from(self, cycle: int) -> None:
        """One call of the system, which needs no room: a process that dies before it leaves the rows as they were."""
        end = 0
        for line in self.path.read_bytes().splitlines(keepends=True):
            if json.loads(line).get("cycle", 0) >= cycle:
                break
            end += len(line)
        os.truncate(self.path, end)


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """The rows in order of their cycles. A torn last line is left out with a warning; of a cycle told twice, by a run
    that was resumed, the later row counts. Raises FormatError for another kind of file, a newer format, a broken line.
    """
    *lines, tail = Path(path).read_bytes().split(b"\n")
    if tail:
        logger.warning("%s: the last line is torn (the run was killed while writing it); it is left out", path)
    records = [_parsed(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]
    if not records or records[0].get("kind") != KIND:
        raise FormatError(f"{path}: not a metrics file (its first line must say {KIND!r})")
    if records[0].get("format") != FORMAT:
        raise FormatError(f"{path}: metrics of format {records[0].get('format')!r}; this version reads format {FORMAT}")
    return _without_superseded(records[1:])


def flatten(phase_metrics: Mapping[str, Sequence[Mapping[str, float]]], groups: Mapping[str, str]) -> dict[str, float]:
    """{"student": ({"loss": .1},), "fake_score": (K of them)} -> {"actor/loss": .1, "critic/loss": mean of K, ...}

    ``groups`` maps a phase's kind to its group: {"student": "actor", "fake_score": "critic"}. Over the repeats of a
    phase times and counts add up (``*seconds``, ``nonfinite``, ``num_*``), of ``peak_*`` the highest counts, of ``lr``
    and ``ema_decay`` the last; all others are means and keep each repeat as ``<group>/<name>.<repeat>``. A name with a
    slash is taken as it is. Raises KeyError for a kind that ``groups`` does not name.
    """
    flat: dict[str, float] = {}
    for kind, repeats in phase_metrics.items():
        for name in dict.fromkeys(name for repeat in repeats for name in repeat):
            key = name if "/" in name else f"{groups[kind]}/{name}"
            flat |= _over_repeats(key, [repeat[name] for repeat in repeats if name in repeat])
    return flat


def keys_over_repeats(key: str, repeats: int) -> list[str]:
    """The keys under which a number of a phase is written that is played so often in a cycle."""
    return list(_over_repeats(key, [0.0] * repeats))


def _over_repeats(key: str, values: Sequence[float]) -> dict[str, float]:
    name = key.rsplit("/", 1)[-1]
    if name.endswith("seconds") or name in ("nonfinite", "weight") or name.startswith("num_"):
        return {key: sum(values)}
    if name.startswith("peak_"):
        return {key: max(values)}
    if name in ("lr", "ema_decay"):
        return {key: values[-1]}
    each = {f"{key}.{repeat}": value for repeat, value in enumerate(values)} if len(values) > 1 else {}
    return {key: sum(values) / len(values)} | each


def _as_json(value: Any) -> int | float | None:
    if type(value) is int:
        return value
    number = float(value)  # numpy's and torch's scalars too
    return number if math.isfinite(number) else None


def _parsed(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        raise FormatError(f"{where}: not JSON; the file is damaged") from None
    if not isinstance(record, dict):
        raise FormatError(f"{where}: not a JSON object; the file is damaged")
    return {name: math.nan if value is None else value for name, value in record.items()}


def _without_superseded(rows: Iterable[dict[str, float]]) -> list[dict[str, float]]:
    kept: list[dict[str, float]] = []
    for row in rows:
        while kept and kept[-1]["cycle"] >= row["cycle"]:
            kept.pop()
        kept.append(row)
    return kept


def _cut_torn_line(path: Path) -> None:
    whole = path.read_bytes().rfind(b"\n") + 1
    if whole < path.stat().st_size:
        logger.warning("%s: the last line is torn; it is cut off", path)
        os.truncate(path, whole)
