"""The page or the picture of a plan: memory over a step, the step as bars, and a map of layouts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import isfinite
from pathlib import Path

from zeromesh.apps.plan.choose.answer import PlanAnswer, fullest_text, layout_text, sentences
from zeromesh.apps.plan.choose.certainty import seconds_text
from zeromesh.apps.plan.choose.search import LayoutCell, PlanCandidate, PlanResult
from zeromesh.apps.plan.choose.space import MeshSizes
from zeromesh.apps.plan.predict.lower_bounds import least_memory
from zeromesh.apps.plan.predict.time import Interval, StepTime, time_of
from zeromesh.base.chart_page import charts_html, heading, paragraphs, write_page
from zeromesh.base.drawing import Bars, Chart, Curves, Grid, GridCell, draw_charts
from zeromesh.base.words import bytes_text
from zeromesh.config.written import row_name

MOST_BARS = 4000  # the longest ones are drawn
MOST_COLUMNS = 14  # of a map
MESH_AXES = ("tensor", "context", "pipeline", "expert")
PAGE_ENDS = (".html", ".htm")
HOVERS = {"": "a step takes ", "grey": "a step takes ", "red": "lacks "}
ACTIONS = {"F": "forward", "I": "input gradient", "W": "weight gradient", "B": "backward"}


def write_picture(told: PlanAnswer, path: Path) -> None:
    """Write a plan as a page, FILE.html, or as a picture; raise ValueError without matplotlib for the latter."""
    request, best = told.result.request, told.result.best
    title, below = f"{request.source.name} on {request.machine.name or 'the machine'}", ""
    if best is not None:
        below = f"{layout_text(best.layout)}, {seconds_text(best.time.seconds)} a step"
    drawn = [*charts(told.result)]
    if path.suffix.lower() in PAGE_ENDS:
        write_page(path, title, [heading(title, below), paragraphs(sentences(told)), charts_html(drawn)])
    else:
        draw_charts(path, f"{title}\n{below}".rstrip(), drawn)


def charts(result: PlanResult) -> Iterator[Chart]:
    """Yield the charts of a plan."""
    request, best = result.request, result.best
    if best is not None:
        yield _memory(best)
        step = best.time
        if not step.intervals:
            step = time_of(request.source, request.sequence, best.layout, best.machine, intervals=True)
        if step.intervals:
            yield _step(step)
    if result.cells:
        yield _map(result)


def _memory(candidate: PlanCandidate) -> Curves:
    rank = candidate.fullest
    states = list(dict.fromkeys(state for moment in rank.timeline for state, size in moment.bytes.items() if size))
    layers = {
        state: [(place, moment.bytes.get(state, 0.0) / 1e9) for place, moment in enumerate(rank.timeline)]
        for state in states
    }
    layers |= {"context": [(place, rank.fixed / 1e9) for place in range(len(rank.timeline))]} if rank.fixed else {}
    return Curves(
        f"memory of the device, GB; peak: {rank.peak.label}, on {fullest_text(candidate)}",
        layers,
        unit="GB",
        stacked=True,
        limit=least_memory(candidate.machine) / 1e9,
        labels=[moment.label for moment in rank.timeline],
    )


def _step(step: StepTime) -> Bars:
    """Return what each resource of each pipeline rank does when."""
    longest = sorted(step.intervals, key=lambda interval: interval.start - interval.end)[:MOST_BARS]
    lanes = sorted(
        {(interval.rank, interval.resource) for interval in longest}, key=lambda lane: (lane[0], lane[1] != "compute")
    )
    several = len({rank for rank, _ in lanes}) > 1
    bars: defaultdict[str, list[tuple[int, float, float]]] = defaultdict(list)
    for interval in sorted(longest, key=lambda interval: interval.start):
        row = lanes.index((interval.rank, interval.resource))
        bars[_kind(interval)].append((row, interval.start, interval.end - interval.start))
    return Bars("a step", [f"{rank} {resource}" if several else resource for rank, resource in lanes], bars)


def _kind(interval: Interval) -> str:
    """Return the word by which intervals are coloured: that before the first number or name of a label."""
    word = interval.label.split(" ")[0].rstrip("0123456789.:,") or interval.resource
    return ACTIONS.get(word, word)


def _map(result: PlanResult) -> Grid:
    """Return all placements and meshes by time, with what does not fit."""

    def best_of(mesh: MeshSizes) -> tuple[float, float, MeshSizes]:
        cells = [cell for (_, cell_mesh), cell in result.cells.items() if cell_mesh == mesh]
        return min(cell.seconds for cell in cells), min(cell.bound for cell in cells), mesh

    # Dense models have no column for the number of expert ranks.
    axes = MESH_AXES[: 4 if any(mesh[3] > 1 for _, mesh in result.cells) else 3]
    axis_names = " x ".join(axes)
    rows = list(dict.fromkeys(row for row, _ in result.cells))
    meshes = sorted(sorted({mesh for _, mesh in result.cells}, key=best_of)[:MOST_COLUMNS])
    fastest = min((cell.seconds for cell in result.cells.values() if isfinite(cell.seconds)), default=1.0)
    cells = {}
    for (row, mesh), cell in result.cells.items():
        if mesh in meshes:
            text, kind = _cell_text(cell)
            tone = fastest / cell.seconds if isfinite(cell.seconds) else None
            hover = f"{row_name(row)}, {axis_names} = {_mesh_text(mesh, axes)}: {HOVERS[kind]}{text}"
            cells[rows.index(row), meshes.index(mesh)] = GridCell(tone, text, hover, kind)
    return Grid(
        f"time of a step by {axis_names}; red: memory that is missing",
        [row_name(row) for row in rows],
        [_mesh_text(mesh, axes) for mesh in meshes],
        cells,
    )


def _mesh_text(mesh: MeshSizes, axes: Sequence[str]) -> str:
    return " x ".join(str(size) for size, _ in zip(mesh, axes, strict=False))


def _cell_text(cell: LayoutCell) -> tuple[str, str]:
    """Return the words of a layout and their kind: its time, a bound of it, or the bytes that it lacks."""
    if isfinite(cell.seconds):
        return seconds_text(cell.seconds), ""
    if isfinite(cell.bound) and cell.over in (0.0, float("inf")):
        return f"≥ {seconds_text(cell.bound)}", "grey"
    over = cell.over if 0 < cell.over < float("inf") else cell.over_bound
    return bytes_text(over) if over else "too large", "red"
