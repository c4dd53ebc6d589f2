"""Charts of how evenly a run's experts were used: by layer and expert, over time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from zeromesh.base.drawing import Chart, Curves, Grid, GridCell

MOST_LAYERS = 2  # whose experts are drawn over time, the most uneven ones
EVEN, MOST = 100, 400  # percent of the mean: the ends of the colours of fullest experts


def expert_charts(records: Sequence[Mapping[str, Any]]) -> Iterator[Chart]:
    """Yield the charts of records of experts; none without records."""
    if not records:
        return
    names = _short_names(list(records[-1]["load"]))
    # Of another model, before the run was resumed with this one.
    records = [record for record in records if record["load"].keys() == names.keys()]
    steps = [f"step {record['step']}" for record in records]
    fullest = {
        (row, column): _cell(max(record["load"][layer]), f"{names[layer]}, {steps[column]}, fullest", EVEN, MOST)
        for row, layer in enumerate(names)
        for column, record in enumerate(records)
    }
    yield Grid("load of each layer's fullest expert, from even to 4 times the mean", [*names.values()], steps, fullest)
    last = records[-1]["load"]
    experts = max(map(len, last.values()))
    loads = {
        (row, expert): _cell(load, f"{names[layer]}, expert {expert}")
        for row, layer in enumerate(names)
        for expert, load in enumerate(last[layer])
    }
    columns = [f"expert {number}" for number in range(experts)]
    yield Grid(f"load by layer and expert at {steps[-1]}, up to twice the mean", [*names.values()], columns, loads)
    uneven = sorted(names, key=lambda layer: -fmean(max(record["load"][layer]) for record in records))
    for layer in uneven[:MOST_LAYERS]:
        cells = {
            (expert, column): _cell(load, f"expert {expert}, {steps[column]}")
            for column, record in enumerate(records)
            for expert, load in enumerate(record["load"][layer])
        }
        rows = [f"expert {number}" for number in range(len(last[layer]))]
        yield Grid(f"load of each expert of {names[layer]}, among the most uneven", rows, steps, cells)
    if any(any(record["dropped"].values()) for record in records):
        points = [(record["step"], 100 * fmean(record["dropped"].values())) for record in records]
        yield Curves("choices that no expert was given, %", {"": points}, unit="%", from_zero=True)


def _cell(load: int, place: str, low: int = 0, high: int = 2 * EVEN) -> GridCell:
    tone = min(1.0, max(0.0, (load - low) / (high - low)))
    return GridCell(tone, hover=f"{place}: {load / EVEN:.2f} times the mean")


def _short_names(layers: Sequence[str]) -> dict[str, str]:
    """Return the part of each name that differs between layers, as "layer 3"."""
    parts = [layer.split(".") for layer in layers]
    if len(parts) < 2 or len({len(each) for each in parts}) > 1:
        return {layer: layer for layer in layers}
    differing = [column for column in range(len(parts[0])) if len({each[column] for each in parts}) > 1]
    return {layer: f"layer {'.'.join(each[i] for i in differing)}" for layer, each in zip(layers, parts, strict=True)}
