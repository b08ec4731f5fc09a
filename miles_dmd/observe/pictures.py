"""Sample grids and metric curves as PNG files."""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from miles_dmd.files import atomic_write_bytes
from miles_dmd.observe.spans import OTHER, TIME_PREFIX

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import Formatter
    from numpy import ndarray

DPI, MAX_WIDTH, CELL_WIDTH = 110, 2000, 128
GAP, LABEL_HEIGHT, TITLE_HEIGHT = 8, 18, 40
INK, MUTED, GREY, GRID = "#1f2933", "#7b8794", "#b0b8c1", "#e4e7eb"
COLOURS = ("#2563a8", "#d9822b", "#3a8f5c", "#b5446e", "#7557a6", "#8c6d46", "#35a3a8", "#c2b035")


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves of some metrics in one picture."""

    title: str
    metrics: tuple[str, ...]
    log: bool = False
    """True for a logarithmic axis."""


def sample_grid(
    images: "ndarray", path: str | Path, labels: Sequence[str] = (), columns: int | None = None, title: str = ""
) -> None:
    """``images`` [N, H, W, 3] uint8 in rows of ``columns`` (a near-square grid without), each under its label.

    A label may run on over images whose label is empty: one prompt a row needs one label a row.
    Small images are enlarged by whole pixels, so that they stay sharp; large ones are shrunk until the PNG is at most
    2,000 pixels wide. Raises ValueError for another shape or dtype, no images, or another number of labels than images.
    """
    if images.ndim != 4 or images.shape[-1] != 3 or str(images.dtype) != "uint8" or len(images) == 0:
        raise ValueError(f"images must be [N, H, W, 3] uint8 with N > 0, got {images.shape} {images.dtype}")
    if labels and len(labels) != len(images):
        raise ValueError(f"{len(images)} images have {len(labels)} labels")
    columns = min(len(images), columns or math.ceil(math.sqrt(len(images))))
    cells = [fitted(image, (MAX_WIDTH - GAP) // columns - GAP) for image in images]
    height, width = cells[0].shape[0] + GAP + (LABEL_HEIGHT if labels else 0), cells[0].shape[1] + GAP
    head = TITLE_HEIGHT if title else GAP
    total = head + math.ceil(len(cells) / columns) * height
    figure = _figure((columns * width + GAP) / DPI, total / DPI)
    for index, cell in enumerate(cells):
        row, column = divmod(index, columns)
        left, top = GAP + column * width, head + row * height + (LABEL_HEIGHT if labels else 0)
        figure.figimage(cell, left, total - top - cell.shape[0], origin="upper")
        if labels and labels[index]:
            room = 1 + sum(1 for _ in takewhile(lambda label: not label, labels[index + 1 : (row + 1) * columns]))
            label, above = shortened(labels[index], (room * width - GAP) // 6), 1 - (top - 4) / total
            figure.text(left / figure.bbox.width, above, label, size=7.5, color=MUTED, va="bottom", parse_math=False)
    if title:
        where = (GAP / figure.bbox.width, 1 - 10 / total)
        figure.text(*where, title, size=11, color=INK, weight="bold", va="top", parse_math=False)
    _save(figure, path)


def fitted(image: "ndarray", limit: int) -> "ndarray":
    """``image`` [H, W, 3] at most ``limit`` wide: times a whole number up to CELL_WIDTH, or shrunk if it is wider."""
    from PIL import Image

    height, width = image.shape[:2]
    if width > limit:
        import numpy

        small = Image.fromarray(image).resize((limit, max(1, round(height * limit / width))), Image.Resampling.LANCZOS)
        return numpy.asarray(small)
    factor = max(1, min(limit, CELL_WIDTH) // width)
    return image.repeat(factor, axis=0).repeat(factor, axis=1)


def curves(rows: Sequence[Mapping[str, float]], path: str | Path, panels: Sequence[Panel], title: str = "") -> None:
    """Small multiples over cycles from read_metrics' ``rows``: ``panels`` with numbers, and time by phase.

    Raises ValueError for no rows.
    """
    if not rows:
        raise ValueError("there are no metrics to draw: the run has no committed cycle")
    panels = [panel for panel in panels if any(name in row for name in panel.metrics for row in rows)]
    phases = _phases(rows)
    number = max(1, len(panels) + bool(phases))
    columns = min(3 if number <= 6 else 4, number)
    lines = math.ceil(number / columns)
    figure = _figure(4.4 * columns, 2.9 * lines + (0.4 if title else 0))
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.12, wspace=0.02, hspace=0.04)
    grid = figure.add_gridspec(lines, columns)
    places = [figure.add_subplot(grid[index // columns, index % columns]) for index in range(number)]
    for axes, panel in zip(places, panels, strict=False):
        _curve_panel(axes, rows, panel.title, panel.metrics, panel.log)
    if phases:
        _time_panel(places[-1], rows, phases)
    if title:
        figure.suptitle(title, x=0.01, ha="left", size=12, color=INK, weight="bold")
    _save(figure, path)


def _curve_panel(axes: "Axes", rows: Sequence[Mapping[str, float]], title: str, keys: Sequence[str], log: bool) -> None:
    _dress(axes, title, rows)
    drawn = [key for key in keys if any(key in row for row in rows)]
    for colour, key in zip(COLOURS, drawn, strict=False):
        cycles, values = zip(*((row["cycle"], row[key]) for row in rows if key in row), strict=True)
        dot = "o" if len(values) == 1 else None
        trend = smoothed(values, max(1, len(values) // 20))
        axes.plot(cycles, values, color=colour, lw=0.8, alpha=0.3)
        axes.plot(cycles, trend, color=colour, lw=1.8, marker=dot, ms=4, label=_told_apart(key, drawn))
    finite = [row[key] for key in drawn for row in rows if key in row and math.isfinite(row[key])]
    if log and finite and min(finite) > 0 and max(finite) > 5 * min(finite):
        _logarithmic(axes)
    if finite and not any(finite):
        axes.set_ylim(-1, 1)
        axes.set_yticks([0])
    if len(drawn) > 1:
        axes.legend(frameon=False, fontsize=8, labelcolor=INK, loc="best", handlelength=1.2)


def _told_apart(key: str, drawn: Sequence[str]) -> str:
    """Label of a curve among those of its panel: its group, or its name where all are of one group."""
    group, _, name = key.partition("/")
    alone = len({other.partition("/")[0] for other in drawn}) == 1
    return name.replace("_", " ") if alone and name else group


def _phases(rows: Sequence[Mapping[str, float]]) -> list[str]:
    found = dict.fromkeys(name for row in rows for name in row if name.startswith(TIME_PREFIX))
    return sorted(
        found, key=lambda name: name == TIME_PREFIX + OTHER
    )  # stable: as they come, but what is left over last


def _time_panel(axes: "Axes", rows: Sequence[Mapping[str, float]], phases: Sequence[str]) -> None:
    _dress(axes, "Seconds per cycle by phase", rows)
    if len(rows) == 1:  # an area needs two ends
        rows = [{**rows[0], "cycle": rows[0]["cycle"] + offset} for offset in (-0.2, 0.2)]
    cycles = [row["cycle"] for row in rows]
    layers = [[row.get(phase, 0.0) for row in rows] for phase in phases]
    labels = [phase.removeprefix(TIME_PREFIX).replace("_", " ") for phase in phases]
    colours = [GREY if phase == TIME_PREFIX + OTHER else colour for phase, colour in zip(phases, cycle(COLOURS))]
    axes.stackplot(cycles, layers, labels=labels, colors=colours, alpha=0.9, lw=0)
    axes.set_ylim(bottom=0)
    handles, names = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1],
        names[::-1],
        frameon=False,
        fontsize=7.5,
        labelcolor=INK,
        loc="center left",
        bbox_to_anchor=(1, 0.5),
        handlelength=1,
    )


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Mean over the last ``window`` finite values: what the eye should follow."""
    found: list[float] = []
    for end in range(1, len(values) + 1):
        recent = [value for value in values[max(0, end - window) : end] if math.isfinite(value)]
        found.append(math.fsum(recent) / len(recent) if recent else math.nan)
    return found


def _figure(width: float, height: float) -> "Figure":
    # no pyplot: it holds figures for ever and picks a backend that may want a display
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=DPI, facecolor="white")


def shortened(label: str, length: int) -> str:
    """At most ``length`` characters: the beginning, cut at a word where that leaves most of it."""
    if len(label) <= length:
        return label
    at_word = label[:length].rsplit(" ", 1)[0]
    cut = at_word if length // 2 < len(at_word) < length else label[: length - 1]
    return cut.rstrip(" ,;:") + "…"


def tick_labels(values: Sequence[float]) -> list[str]:
    """Four digits, or as many more as tell neighbours apart: a loss that hardly moves had "1" on every tick."""
    for digits in range(4, 17):
        labels = [f"{value:.{digits}g}" for value in values]
        if len(set(labels)) == len(set(values)):
            break
    return labels


def _tick_formatter() -> "Formatter":
    from matplotlib.ticker import Formatter

    class Distinct(Formatter):
        def __call__(self, x: float, pos: int | None = None) -> str:
            return f"{x:.4g}"

        def format_ticks(self, values: Sequence[float]) -> list[str]:
            return tick_labels(values)

    return Distinct()


def _logarithmic(axes: "Axes") -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    plain = axes.yaxis.get_major_formatter()
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(plain)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())


def _dress(axes: "Axes", title: str, rows: Sequence[Mapping[str, float]]) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, loc="left", size=10, color=INK)
    axes.set_xlabel("cycle", size=8, color=MUTED)
    axes.tick_params(labelsize=8, colors=MUTED, length=0)
    axes.grid(color=GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    first, last = rows[0]["cycle"], rows[-1]["cycle"]
    if first < last:
        axes.set_xlim(first, last)
    else:
        axes.set_xlim(first - 0.5, first + 0.5)
        axes.set_xticks([first])
    axes.yaxis.set_major_formatter(_tick_formatter())
    axes.spines[:].set_visible(False)
    axes.spines["bottom"].set(visible=True, color=GRID)


def _save(figure: "Figure", path: str | Path) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    atomic_write_bytes(path, buffer.getvalue())
