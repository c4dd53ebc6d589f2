"""Charts as data, and their picture by matplotlib; ``chart_page`` writes the same charts as an HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from zeromesh.base.requirements import pip_install

WIDTH = 12.0  # inches
MOST_NAMES = 48  # beside a grid, which can be read


@dataclass(frozen=True)
class Curves:
    """Curves over a number, or areas on top of each other; a value that is no finite number leaves a gap."""

    title: str
    curves: Mapping[str, Sequence[tuple[float, float]]]
    across: str = "step"  # the word for a place on the horizontal axis
    unit: str = ""
    from_zero: bool = False  # the vertical axis begins at 0
    stacked: bool = False
    points: frozenset[str] = frozenset()  # curves with a dot at each value
    marks: Sequence[float] = ()  # places of dotted vertical lines
    mark: str = ""  # what these lines are
    limit: float | None = None  # value of a red line
    labels: Sequence[str] = ()  # names of the places 0, 1, ... where they are no numbers for people


@dataclass(frozen=True)
class Bars:
    """Bars in named rows: row, start and length in seconds of each, by what its colour stands for."""

    title: str
    rows: Sequence[str]
    bars: Mapping[str, Sequence[tuple[int, float, float]]]


class GridCell(NamedTuple):
    """A cell of a grid."""

    tone: float | None  # from 0 (light) to 1 (dark); None: no colour
    text: str = ""
    hover: str = ""
    kind: str = ""  # "grey" or "red" text


@dataclass(frozen=True)
class Grid:
    """Cells by row and column."""

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    cells: Mapping[tuple[int, int], GridCell] = field(default_factory=dict)
    hue: str = "blue"  # or "orange"

    @property
    def has_text(self) -> bool:
        """True if people are to read the cells."""
        return any(cell.text for cell in self.cells.values())


Chart = Curves | Bars | Grid


def require_matplotlib() -> Any:
    """Return matplotlib's class of figures, which leaves the user's backend alone; raise ValueError without it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            f"a picture needs matplotlib ({error}): {pip_install('matplotlib')}; a page, FILE.html, needs nothing"
        ) from None
    return Figure


def require_picture(path: Path) -> None:
    """Raise ValueError if ``draw_charts`` cannot write a picture in the format of the end of a path."""
    ends = require_matplotlib()().canvas.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in ends or path.is_dir():
        raise ValueError(f"{str(path)!r} names no picture; end it in .html for a page, or in one of {', '.join(ends)}")


def draw_charts(path: Path, title: str, charts: Sequence[Chart]) -> None:
    """Write a picture, in the format of the end of its name; raise ValueError without matplotlib or for another end."""
    heights = [_height(chart) for chart in charts]
    figure = require_matplotlib()(figsize=(WIDTH, 0.5 + sum(heights)), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", parse_math=False)
    ratios = {"height_ratios": heights}
    places = figure.subplots(len(charts), gridspec_kw=ratios, squeeze=False)[:, 0]
    for chart, axes in zip(charts, places, strict=True):
        axes.set_title(chart.title, loc="left", fontsize="medium", parse_math=False)
        draw_chart(chart, axes)
    figure.savefig(path, dpi=120)


def _height(chart: Chart) -> float:
    """Return the inches of a chart."""
    if isinstance(chart, Curves):
        return 3.0 if chart.stacked else 1.9
    return min(6.0, max(1.8, 1.0 + 0.3 * len(chart.rows)))


def draw_chart(chart: Chart, axes: Any) -> None:
    """Draw a chart into axes of matplotlib."""
    if isinstance(chart, Curves):
        _draw_curves(chart, axes)
    elif isinstance(chart, Bars):
        _draw_bars(chart, axes)
    else:
        _draw_grid(chart, axes)


def _draw_curves(chart: Curves, axes: Any) -> None:
    if chart.stacked:
        places = [place for place, _ in next(iter(chart.curves.values()))]
        values = [[value for _, value in points] for points in chart.curves.values()]
        axes.stackplot(places, *values, labels=[*chart.curves])
    else:
        for name, points in chart.curves.items():
            marker = "o" if name in chart.points else ""
            axes.plot(*zip(*points, strict=True), linewidth=1, marker=marker, label=name)
    for place in chart.marks:
        axes.axvline(place, color="tab:red", linestyle=":", linewidth=1)
    if chart.limit is not None:
        axes.axhline(chart.limit, color="tab:red")
    if chart.from_zero:
        axes.set_ylim(bottom=0)
    if chart.labels:
        ends = (0, len(chart.labels) - 1)
        axes.set_xticks(ends, [chart.labels[place] for place in ends])
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small", frameon=False)


def _draw_bars(chart: Bars, axes: Any) -> None:
    from matplotlib import colormaps

    for number, (kind, places) in enumerate(chart.bars.items()):
        for row in sorted({row for row, _, _ in places}):
            spans = [(start, length) for place, start, length in places if place == row]
            axes.broken_barh(spans, (row - 0.4, 0.8), color=colormaps["tab10"](number % 10), label=kind)
            kind = ""  # named once
    axes.set_yticks(range(len(chart.rows)), chart.rows, fontsize="small")
    axes.invert_yaxis()
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small", frameon=False)


def _draw_grid(chart: Grid, axes: Any) -> None:
    tones = [[float("nan")] * len(chart.columns) for _ in chart.rows]
    for (row, column), cell in chart.cells.items():
        if cell.tone is not None:
            tones[row][column] = cell.tone
        colour = {"grey": "grey", "red": "tab:red"}.get(cell.kind, "black")
        axes.text(column, row, cell.text, ha="center", va="center", fontsize=6, color=colour)
    colours = "Blues" if chart.hue == "blue" else "OrRd"
    axes.imshow(tones, aspect="auto", vmin=0.0, vmax=2.0, cmap=colours, interpolation="nearest")
    if len(chart.rows) <= MOST_NAMES:
        axes.set_yticks(range(len(chart.rows)), chart.rows, fontsize="small")
    axes.set_xticks(range(len(chart.columns)), chart.columns, rotation=45, fontsize="small")
