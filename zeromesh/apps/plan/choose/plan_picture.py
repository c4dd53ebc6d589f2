"""The picture of a plan: memory over a step, the step as bars, and a map of layouts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

from zeromesh.apps.plan.choose.answer import PlanAnswer, fullest_text, layout_text
from zeromesh.apps.plan.choose.certainty import seconds_text
from zeromesh.apps.plan.choose.search import LayoutCell, PlanCandidate, PlanResult
from zeromesh.apps.plan.predict.lower_bounds import least_memory
from zeromesh.apps.plan.predict.time import Interval, StepTime, time_of
from zeromesh.base.drawing import ChartPanel, draw_bars, draw_panels
from zeromesh.base.words import bytes_text
from zeromesh.config.written import row_name

MOST_BARS = 4000  # the longest ones are drawn
MOST_COLUMNS = 14  # of a map
ACTIONS = {"F": "forward", "I": "input gradient", "W": "weight gradient", "B": "backward"}


def write_picture(told: PlanAnswer, path: Path) -> None:
    """Draw a plan; raise ValueError without matplotlib."""
    request, best = told.result.request, told.result.best
    title = f"{request.source.name} on {request.machine.name or 'the machine'}"
    if best is not None:
        title += f"\n{layout_text(best.layout)}, {seconds_text(best.time.seconds)} a step"
    draw_panels(path, title, [*_panels(told.result, best)])


def _panels(result: PlanResult, best: PlanCandidate | None) -> Iterator[ChartPanel]:
    request = result.request
    if best is not None:
        peak = f"most, at the {best.fullest.peak.label}, on {fullest_text(best)}"
        yield ChartPanel(f"device memory, GB: {peak}; red: the limit", 3.0, partial(_memory, best))
        step = best.time
        if not step.intervals:
            step = time_of(request.source, request.sequence, best.layout, best.machine, intervals=True)
        lanes = {(interval.rank, interval.resource) for interval in step.intervals}
        yield ChartPanel("a step, seconds", min(6.0, 1.8 + 0.2 * len(lanes)), partial(_step, step))
    if result.cells:
        rows = len({row for row, _ in result.cells})
        yield ChartPanel("layouts by tensor x context x pipeline; red: lacks", 1.0 + 0.3 * rows, partial(_map, result))


def _memory(candidate: PlanCandidate, axes: Any) -> None:
    rank = candidate.fullest
    states = list(dict.fromkeys(state for moment in rank.timeline for state, size in moment.bytes.items() if size))
    layers = {state: [moment.bytes.get(state, 0.0) / 1e9 for moment in rank.timeline] for state in states}
    layers |= {"context": [rank.fixed / 1e9] * len(rank.timeline)} if rank.fixed else {}
    axes.stackplot(range(len(rank.timeline)), *layers.values(), labels=[*layers])
    axes.axhline(least_memory(candidate.machine) / 1e9, color="tab:red")
    ends = (0, len(rank.timeline) - 1)
    axes.set_xticks(ends, [rank.timeline[place].label for place in ends])
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small", frameon=False)


def _step(step: StepTime, axes: Any) -> None:
    """Draw what each resource of each pipeline rank does when."""
    longest = sorted(step.intervals, key=lambda interval: interval.start - interval.end)[:MOST_BARS]
    lanes = sorted(
        {(interval.rank, interval.resource) for interval in longest}, key=lambda lane: (lane[0], lane[1] != "compute")
    )
    several = len({rank for rank, _ in lanes}) > 1
    bars: defaultdict[str, list[tuple[int, float, float]]] = defaultdict(list)
    for interval in longest:
        row = lanes.index((interval.rank, interval.resource))
        bars[_kind(interval)].append((row, interval.start, interval.end - interval.start))
    if bars:
        draw_bars(axes, [f"{rank} {resource}" if several else resource for rank, resource in lanes], bars)


def _kind(interval: Interval) -> str:
    """Return the word by which intervals are coloured: that before the first number or name of a label."""
    word = interval.label.split(" ")[0].rstrip("0123456789.:,") or interval.resource
    return ACTIONS.get(word, word)


def _map(result: PlanResult, axes: Any) -> None:
    """Draw all placements and meshes by time, with what does not fit."""

    def best_of(mesh: tuple[int, int, int]) -> tuple[float, float, tuple[int, int, int]]:
        cells = [cell for (_, cell_mesh), cell in result.cells.items() if cell_mesh == mesh]
        return min(cell.seconds for cell in cells), min(cell.bound for cell in cells), mesh

    rows = list(dict.fromkeys(row for row, _ in result.cells))
    meshes = sorted(sorted({mesh for _, mesh in result.cells}, key=best_of)[:MOST_COLUMNS])
    fastest = min((cell.seconds for cell in result.cells.values() if isfinite(cell.seconds)), default=1.0)
    speeds = [[float("nan")] * len(meshes) for _ in rows]
    for (row, mesh), cell in result.cells.items():
        if mesh in meshes:
            y, x = rows.index(row), meshes.index(mesh)
            text, colour = _cell_text(cell)
            if isfinite(cell.seconds):
                speeds[y][x] = fastest / cell.seconds
            axes.text(x, y, text, ha="center", va="center", fontsize=6, color=colour)
    axes.imshow(speeds, aspect="auto", vmin=0.0, vmax=2.0, cmap="Blues")
    axes.set_yticks(range(len(rows)), [row_name(row) for row in rows], fontsize="small")
    axes.set_xticks(range(len(meshes)), [" x ".join(map(str, mesh)) for mesh in meshes], rotation=45, fontsize="small")


def _cell_text(cell: LayoutCell) -> tuple[str, str]:
    """Return the words of a layout and their colour: its time, a bound of it, or the bytes that it lacks."""
    if isfinite(cell.seconds):
        return seconds_text(cell.seconds), "black"
    if isfinite(cell.bound) and cell.over in (0.0, float("inf")):
        return f"≥ {seconds_text(cell.bound)}", "grey"
    over = cell.over if 0 < cell.over < float("inf") else cell.over_bound
    return bytes_text(over) if over else "too large", "tab:red"
