"""One HTML file with charts, tables and texts, which loads nothing and needs no program but a browser.

Curves are SVG that is stretched to the window. Labels are HTML over it and keep their size, so that a phone shows them
as large as a desktop does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from math import ceil, floor, isfinite, log10
from pathlib import Path

from zeromesh.base.drawing import Bars, Chart, Curves, Grid
from zeromesh.base.files import write_text

HEIGHT = 1000  # units of a plot, and its width, before it is stretched
MOST_POINTS = 1500  # of a curve; beyond, each stretch of it shows its lowest and its highest value
MOST_ROWS, MOST_COLUMNS = 64, 120  # of a grid without text; beyond, neighbours share a cell with the darkest of them
COLOURS = 10  # of the style sheet


def write_page(path: Path, title: str, parts: Sequence[str], reload_seconds: int | None = None) -> None:
    """Write a page of parts in HTML; a browser reads it anew every ``reload_seconds``."""
    folder = files("zeromesh.base")
    style, script = ((folder / f"page.{end}").read_text(encoding="utf-8") for end in ("css", "js"))
    reload_line = f"setTimeout(() => location.reload(), {1000 * reload_seconds});" if reload_seconds else ""
    write_text(
        path,
        f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<main>
{chr(10).join(parts)}
</main>
<div id="tip" role="status" hidden></div>
<script>
{script}{reload_line}
</script>
</body>
</html>
""",
    )


def heading(title: str, below: str = "") -> str:
    """Return the head of a page."""
    return f"<h1>{escape(title)}</h1>" + (f'<p class="below">{escape(below)}</p>' if below else "")


def tiles(values: Mapping[str, str]) -> str:
    """Return figures in boxes, by what they are."""
    boxes = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in values.items())
    return f'<dl class="tiles">{boxes}</dl>'


def table(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """Return a table of two columns under a heading."""
    lines = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    return f'<h2>{escape(title)}</h2><table class="facts">{lines}</table>'


def texts(title: str, blocks: Sequence[str], folded: bool = False) -> str:
    """Return texts with their line breaks under a heading, or under one that opens them."""
    inside = "".join(f"<pre>{escape(block)}</pre>" for block in blocks)
    if folded:
        return f"<details><summary>{escape(title)}</summary>{inside}</details>"
    return f"<h2>{escape(title)}</h2>{inside}"


def paragraphs(lines: Sequence[str]) -> str:
    """Return paragraphs."""
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


def charts_html(charts: Iterable[Chart]) -> str:
    """Return charts as figures, two beside each other where there is room."""
    return f'<div class="charts">{"".join(map(_figure, charts))}</div>'


def _figure(chart: Chart) -> str:
    if isinstance(chart, Curves):
        legend, inside = _curves(chart)
    elif isinstance(chart, Bars):
        legend, inside = _bars(chart)
    else:
        legend, inside = "", _grid(chart)
    is_wide = not isinstance(chart, Curves) or chart.stacked or len(chart.curves) > 1
    kind = ' class="full"' if is_wide else ""
    return f"<figure{kind}><figcaption><b>{escape(chart.title)}</b>{legend}</figcaption>{inside}</figure>"


def value_text(value: float) -> str:
    """Return a number with four digits, without an exponent where it is short."""
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}"
    digits = max(0, 3 - floor(log10(abs(value)))) if value else 0
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return round numbers from at most ``low`` to at least ``high``."""
    if high <= low:
        low, high = low - abs(low) * 0.05 - 0.5, high + abs(high) * 0.05 + 0.5
    size = 10 ** floor(log10((high - low) / most))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor * most >= (high - low) * 0.999)
    first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def thinned(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """Return at most about ``most`` points: the lowest and the highest of each stretch, in order."""
    if len(points) <= most:
        return [*points]
    size = ceil(2 * len(points) / most)
    extremes: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        stretch = [point for point in points[start : start + size] if isfinite(point[1])] or [points[start]]
        ends = {min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])}
        extremes += sorted(ends)
    return [points[0], *extremes, points[-1]]


def _legend(names: Sequence[str], more: str = "") -> str:
    keys = "".join(
        f'<span class="key"><i class="c{number % COLOURS}"></i>{escape(name)}</span>'
        for number, name in enumerate(names)
        if name
    )
    return keys + more


def _curves(chart: Curves) -> tuple[str, str]:
    shown = {name: thinned(points) for name, points in chart.curves.items() if points}
    tops = _stacked(shown) if chart.stacked else shown
    values = [value for points in tops.values() for _, value in points if isfinite(value)]
    values += [0.0] if chart.from_zero or chart.stacked or not values else []
    values += [] if chart.limit is None else [chart.limit]
    heights = ticks(min(values), max(values))
    places = [place for points in shown.values() for place, _ in points] or [0.0, 1.0]
    left, right = min(places), max(places)

    def x(place: float) -> float:
        return round((place - left) / ((right - left) or 1.0) * HEIGHT, 1)

    def y(value: float) -> float:
        return round((1 - (value - heights[0]) / (heights[-1] - heights[0])) * HEIGHT, 1)

    drawn = [f'<line class="rule" x1="0" x2="{HEIGHT}" y1="{y(tick)}" y2="{y(tick)}"/>' for tick in heights]
    ends = [(place, 0.0) for place, _ in next(iter(tops.values()), [])]
    for number, (name, points) in enumerate(tops.items()):
        colour = f"c{number % COLOURS}"
        if chart.stacked:
            outline = [*points, *reversed(ends)]
            drawn.append(f'<polygon class="{colour}" points="{_pairs(outline, x, y)}"/>')
            ends = [*points]
            continue
        for stretch in _stretches(points):
            drawn.append(f'<polyline class="{colour}" points="{_pairs(stretch, x, y)}"/>')
        if name in chart.points or len(points) == 1:
            drawn += [
                f'<line class="dot {colour}" x1="{x(place)}" x2="{x(place)}" y1="{y(value)}" y2="{y(value)}"/>'
                for place, value in points
                if isfinite(value)
            ]
    drawn += [f'<line class="mark" x1="{x(at)}" x2="{x(at)}" y1="0" y2="{HEIGHT}"/>' for at in chart.marks]
    if chart.limit is not None:
        drawn.append(f'<line class="limit" x1="0" x2="{HEIGHT}" y1="{y(chart.limit)}" y2="{y(chart.limit)}"/>')
    hover = {
        "across": chart.across,
        "unit": chart.unit,
        "left": left,
        "right": right,
        "labels": [*chart.labels],
        "curves": [
            [name, [[at, value_text(value)] for at, value in points if isfinite(value)]]
            for name, points in shown.items()
        ],
    }
    sides = "".join(f'<span class="y" style="top:{y(tick) / HEIGHT:.2%}">{value_text(tick)}</span>' for tick in heights)
    last = value_text(right) if right > left else ""
    below = [chart.labels[0], chart.labels[-1]] if chart.labels else [f"{chart.across} {value_text(left)}", last]
    svg = f'<svg viewBox="0 0 {HEIGHT} {HEIGHT}" preserveAspectRatio="none" aria-hidden="true">{"".join(drawn)}</svg>'
    plot = f'<div class="plot{" tall" if chart.stacked else ""}">{sides}'
    plot += f'<div class="area" tabindex="0" data-curves="{escape(json.dumps(hover))}">{svg}<hr hidden></div></div>'
    more = f'<span class="key"><i class="dotted"></i>{escape(chart.mark)}</span>' if chart.marks and chart.mark else ""
    more += '<span class="key"><i class="red"></i>limit</span>' if chart.limit is not None else ""
    axis = f'<div class="x"><span>{escape(below[0])}</span><span>{escape(below[1])}</span></div>'
    return _legend([*shown] if len(shown) > 1 or more else [], more), plot + axis


def _stacked(curves: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, list[tuple[float, float]]]:
    tops: dict[str, list[tuple[float, float]]] = {}
    heights: list[float] = []
    for name, points in curves.items():
        heights = [below + value for below, (_, value) in zip(heights or [0.0] * len(points), points, strict=True)]
        tops[name] = [(place, top) for (place, _), top in zip(points, heights, strict=True)]
    return tops


def _stretches(points: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """Return the parts of a curve between its gaps."""
    parts: list[list[tuple[float, float]]] = [[]]
    for point in points:
        if isfinite(point[1]):
            parts[-1].append(point)
        elif parts[-1]:
            parts.append([])
    return [part for part in parts if part]


def _pairs(points: Sequence[tuple[float, float]], x: Callable[[float], float], y: Callable[[float], float]) -> str:
    return " ".join(f"{x(place)},{y(value)}" for place, value in points)


def _bars(chart: Bars) -> tuple[str, str]:
    every = [bar for bars in chart.bars.values() for bar in bars]
    first, last = min((bar[1] for bar in every), default=0.0), max((bar[1] + bar[2] for bar in every), default=1.0)
    seconds = (last - first) or 1.0
    lanes: list[list[str]] = [[] for _ in chart.rows]
    for number, (kind, bars) in enumerate(chart.bars.items()):
        for row, start, length in bars:
            hover = f"{kind}: {value_text(length)} s, from {value_text(start - first)} s"
            place = f"left:{(start - first) / seconds:.3%};width:{length / seconds:.3%}"
            lanes[row].append(f'<i class="c{number % COLOURS}" style="{place}" data-tip="{escape(hover)}"></i>')
    rows = "".join(
        f'<div class="lane"><span>{escape(name)}</span><div>{"".join(lane)}</div></div>'
        for name, lane in zip(chart.rows, lanes, strict=True)
    )
    axis = f'<div class="x"><span>0 s</span><span>{value_text(seconds)} s</span></div>'
    return _legend([*chart.bars]), f'<div class="lanes">{rows}</div>{axis}'


def _grid(chart: Grid) -> str:
    rows, columns = range(len(chart.rows)), range(len(chart.columns))
    wide = 1 if chart.has_text else ceil(len(columns) / MOST_COLUMNS) or 1
    deep = 1 if chart.has_text else ceil(len(rows) / MOST_ROWS) or 1
    lines = []
    for row in rows[::deep]:
        cells = []
        for column in columns[::wide]:
            here = [
                chart.cells[place]
                for place in ((r, c) for r in rows[row : row + deep] for c in columns[column : column + wide])
                if place in chart.cells
            ]
            if not here:
                cells.append("<td></td>")
                continue
            cell = max(here, key=lambda cell: -1.0 if cell.tone is None else cell.tone)
            tone = "" if cell.tone is None else f' style="--tone:{min(1.0, max(0.0, cell.tone)):.2f}"'
            kind = f' class="{cell.kind}"' if cell.kind else ""
            tip = f' data-tip="{escape(cell.hover)}"' if cell.hover else ""
            cells.append(f"<td{kind}{tone}{tip}>{escape(cell.text)}</td>")
        name = chart.rows[row] + (f" to {chart.rows[min(row + deep, len(rows)) - 1]}" if deep > 1 else "")
        lines.append(f"<tr><th>{escape(name)}</th>{''.join(cells)}</tr>")
    kind = f"grid {chart.hue} {'words' if chart.has_text else 'tones'}"
    if chart.has_text:
        head = "".join(f"<th>{escape(name)}</th>" for name in chart.columns)
        return f'<div class="wide"><table class="{kind}"><tr><th></th>{head}</tr>{"".join(lines)}</table></div>'
    axis = f'<div class="x"><span>{escape(chart.columns[0])}</span><span>{escape(chart.columns[-1])}</span></div>'
    return f'<table class="{kind}">{"".join(lines)}</table>{axis}'
