"""One HTML page of a plan: memory over a step, the step as bars, and a map of layouts; it loads nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from zeromesh.config.written import row_name
from zeromesh.model.placement import PlacementRow
from zeromesh.observe.svg import COLOURS, LEFT, RIGHT, WIDTH, html_page, label, legend, svg
from zeromesh.observe.units import bytes_text, scaled_text
from zeromesh.plan.answer import PlanAnswer, fullest_text, layout_text, reason_of, seconds_text, sentences
from zeromesh.plan.bounds import least_memory
from zeromesh.plan.search import LayoutCell, PlanCandidate, PlanResult
from zeromesh.plan.time import Interval, StepTime, time_of

MOST_MOMENTS = 480  # of a timeline that are drawn
MOST_BARS = 4000
MOST_COLUMNS = 14  # of a map
ACTIONS = {"F": "forward", "I": "input gradient", "W": "weight gradient", "B": "backward"}


def page(told: PlanAnswer) -> str:
    """Return the page."""
    result, best = told.result, told.result.best
    request = result.request
    name = escape(request.source.name)
    parts = [f"<h1>{name} on {escape(request.machine.name or 'the machine')}</h1>"]
    parts += [f"<p>{escape(text)}</p>" for text in sentences(told)]
    if best is not None:
        parts += ["<h2>Layouts</h2>", _table(result)]
        caption = (
            f"Device memory of {fullest_text(best)}, by what it is for; the line is the device's limit. Most is "
            f"used at the {best.fullest.peak.label}."
        )
        parts += ["<h2>Memory over a step</h2>", f"<p>{escape(caption)}</p>", memory_chart(best)]
        drawn = best.time
        if not drawn.intervals:
            drawn = time_of(request.source, request.sequence, best.layout, best.machine, intervals=True)
        parts += ["<h2>A step</h2>", step_chart(drawn)]
    parts += ["<h2>All layouts</h2>", MAP_TEXT, layout_map(result)]
    return html_page(f"Plan of {request.source.name}", parts)


MAP_TEXT = (
    "<p>Each cell is the fastest layout of a placement and a mesh (tensor x context x pipeline ranks), dark being "
    "fast. A time after &ge; is a bound of layouts that were not computed; red cells do not fit, by the bytes that "
    "they lack.</p>"
)


def _table(result: PlanResult) -> str:
    rows = ["<tr><th>step</th><th>tokens/s</th><th>MFU</th><th>device</th><th>layout</th><th>bound by</th></tr>"]
    for candidate in result.shown:
        numbers = (
            seconds_text(candidate.time.seconds), scaled_text(candidate.tokens_per_second), f"{candidate.mfu:.1%}",
            bytes_text(candidate.fullest.device),
        )  # fmt: skip
        cells = "".join(f'<td class="n">{value}</td>' for value in numbers)
        rows.append(
            f"<tr>{cells}<td>{escape(layout_text(candidate.layout))}</td><td>{escape(reason_of(candidate))}</td></tr>"
        )
    return f"<table>{''.join(rows)}</table>"


def memory_chart(candidate: PlanCandidate) -> str:
    """Return a picture of the fullest rank's memory over the moments of a step, with the device's limit."""
    rank, limit = candidate.fullest, least_memory(candidate.machine)
    step = -(-len(rank.timeline) // MOST_MOMENTS)
    # Of each stretch the moment with most bytes, so that no peak is lost.
    stretches = (rank.timeline[i : i + step] for i in range(0, len(rank.timeline), step))
    moments = [max(stretch, key=lambda moment: moment.total) for stretch in stretches]
    states = list(dict.fromkeys(state for moment in moments for state, size in moment.bytes.items() if size))
    layers = [("context", [rank.fixed] * len(moments))] if rank.fixed else []
    layers += [(state, [moment.bytes.get(state, 0.0) for moment in moments]) for state in states]
    top, height = 20.0, 300.0
    highest = max(limit, candidate.fullest.device) * 1.05
    width = WIDTH - LEFT - RIGHT

    def x(place: int) -> float:
        return LEFT + width * place / max(1, len(moments) - 1)

    def y(size: float) -> float:
        return top + height * (1 - size / highest)

    body, base = [], [0.0] * len(moments)
    for number, (state, sizes) in enumerate(layers):
        upper = [low + size for low, size in zip(base, sizes, strict=True)]
        outline = [*enumerate(upper), *reversed([*enumerate(base)])]
        points = " ".join(f"{x(place):.1f},{y(size):.1f}" for place, size in outline)
        title = f"<title>{escape(state)}</title>"
        body.append(f'<polygon points="{points}" fill="{COLOURS[number % len(COLOURS)]}">{title}</polygon>')
        base = upper
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        body.append(label(LEFT - 8, y(limit * share) + 4, bytes_text(limit * share), "end"))
    line_y = f'y1="{y(limit):.1f}" y2="{y(limit):.1f}"'
    body.append(f'<line x1="{LEFT}" x2="{LEFT + width}" {line_y} stroke="#c00" stroke-width="2"/>')
    body += legend([state for state, _ in layers], top)
    body.append(label(LEFT, top + height + 18, moments[0].label))
    body.append(label(LEFT + width, top + height + 18, moments[-1].label, "end"))
    return svg(top + height + 26, body)


def step_chart(time: StepTime) -> str:
    """Return a picture of what each resource of each pipeline rank does when."""
    if not time.intervals:
        return "<p>There are no intervals to draw.</p>"
    in_order = sorted(
        time.intervals, key=lambda interval: (interval.rank, interval.resource != "compute", interval.resource)
    )
    lanes = list(dict.fromkeys((interval.rank, interval.resource) for interval in in_order))
    kinds = list(dict.fromkeys(_kind(interval) for interval in time.intervals))
    end = max(interval.end for interval in time.intervals)
    width, high, top = WIDTH - LEFT - RIGHT - 40, 20.0, 10.0
    body = []
    several = len({rank for rank, _ in lanes}) > 1
    for place, (rank, resource) in enumerate(lanes):
        name = f"{rank} {resource}" if several else resource
        body.append(label(LEFT + 34, top + high * place + 14, name, "end"))
    for interval in _visible(time.intervals, end / width / 2):
        place = lanes.index((interval.rank, interval.resource))
        x, wide = LEFT + 40 + width * interval.start / end, max(0.5, width * (interval.end - interval.start) / end)
        colour = COLOURS[kinds.index(_kind(interval)) % len(COLOURS)]
        title = f"<title>{escape(interval.label)}: {seconds_text(interval.end - interval.start)}</title>"
        body.append(
            f'<rect x="{x:.1f}" y="{top + high * place:.1f}" width="{wide:.1f}" height="{high - 3:.1f}" '
            f'fill="{colour}">{title}</rect>'
        )
    bottom = top + high * len(lanes)
    for share in (0.0, 0.5, 1.0):
        body.append(
            label(LEFT + 40 + width * share, bottom + 16, seconds_text(end * share) if share else "0", "middle")
        )
    body += legend(kinds[: len(COLOURS)], top)
    return svg(max(bottom + 24, top + 18 * min(len(kinds), len(COLOURS)) + 10), body)


def _kind(interval: Interval) -> str:
    """Return the word by which intervals are coloured: that before the first number or name of a label."""
    word = interval.label.split(" ")[0].rstrip("0123456789.:,") or interval.resource
    return ACTIONS.get(word, word)


def _visible(intervals: Sequence[Interval], least: float) -> list[Interval]:
    """Return the intervals that can be seen, the longest first where there are too many."""
    long = [interval for interval in intervals if interval.end - interval.start >= least]
    longest = sorted(long, key=lambda interval: interval.start - interval.end)[:MOST_BARS]
    return sorted(longest, key=lambda interval: (interval.start, interval.rank, interval.resource))


def layout_map(result: PlanResult) -> str:
    """Return a picture of all placements and meshes by time, with what does not fit."""
    rows: list[PlacementRow] = list(dict.fromkeys(row for row, _ in result.cells))

    def rank(mesh: tuple[int, int, int]) -> tuple[float, float, tuple[int, int, int]]:
        cells = [cell for (_, cell_mesh), cell in result.cells.items() if cell_mesh == mesh]
        return min(cell.seconds for cell in cells), min(cell.bound for cell in cells), mesh

    best = sorted({mesh for _, mesh in result.cells}, key=rank)[:MOST_COLUMNS]
    meshes = sorted(best)
    times = [cell.seconds for cell in result.cells.values() if cell.seconds < float("inf")]
    fastest = min(times, default=1.0)
    left, top, high = 330.0, 70.0, 26.0
    wide = min(90.0, (WIDTH - left) / max(1, len(meshes)))
    body = []
    for place, mesh in enumerate(meshes):
        x = left + wide * (place + 0.5)
        turned = f'transform="rotate(-45 {x:.1f} {top - 8:g})"'
        body.append(f'<text x="{x:.1f}" y="{top - 8:g}" {turned}>{" x ".join(map(str, mesh))}</text>')
    for number, row in enumerate(rows):
        y = top + high * number
        body.append(label(left - 8, y + 17, row_name(row), "end"))
        for place, mesh in enumerate(meshes):
            cell = result.cells.get((row, mesh))
            if cell is not None:
                body.append(_cell(cell, fastest, left + wide * place, y, wide, high))
    return svg(top + high * len(rows) + 10, body)


def _cell(cell: LayoutCell, fastest: float, x: float, y: float, wide: float, high: float) -> str:
    if cell.seconds < float("inf"):
        text, share = seconds_text(cell.seconds), fastest / cell.seconds
        colour = f"hsl(205 70% {92 - 52 * min(1.0, share) ** 2:.0f}%)"
    elif cell.bound < float("inf") and cell.over in (0.0, float("inf")):
        text, colour = f"≥ {seconds_text(cell.bound)}", "#eee"
    else:
        over = cell.over if 0 < cell.over < float("inf") else cell.over_bound
        text, colour = f"{bytes_text(over)} over" if over else "too large", "#f6c9c0"
    # Narrow cells have no room for words; the title says them.
    shown = text if wide >= 7 * len(text) else ""
    ink = "#fff" if cell.seconds < float("inf") and fastest / cell.seconds > 0.75 else "#222"
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide - 1:.1f}" height="{high - 1:g}" fill="{colour}">'
        f"<title>{escape(text)}</title></rect>"
        f'<text x="{x + wide / 2:.1f}" y="{y + 17:.1f}" text-anchor="middle" style="font-size:10px;fill:{ink}">'
        f"{escape(shown)}</text>"
    )
