"""From the rows of ``scale.py`` to a page with tables and a picture: ``python benchmarks/scale_page.py scale.json``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from page import LIST, lines_of

Row = dict[str, Any]
Figure = Callable[[Row], float | Sequence[float]]

STYLES = {
    "ZeroMesh, stage 0": ("#56B4E9", "o-"),
    "ZeroMesh, stage 1": ("#009E73", "o-"),
    "ZeroMesh, stage 2": ("#CC79A7", "o-"),
    "ZeroMesh, stage 3": ("#0072B2", "o-"),
    "ZeroMesh": ("#0072B2", "o-"),
    "FSDP2": ("#E69F00", "s--"),
    "DDP": ("#999999", "^--"),
    "DCP": ("#E69F00", "s--"),
}
"""Colour and form of a library's line."""

STEP: list[tuple[str, str, Figure, float]] = [
    ("CPU ms of a step", ".2f", lambda row: row["step_seconds"], 1e3),
    ("of these in the fake group, ms", ".2f", lambda row: row["fake_seconds"], 1e3),
    ("CPU s of `initialize`", ".3f", lambda row: row["initialize_seconds"], 1.0),
    ("MB of memory after steps", ".1f", lambda row: row["memory_mb"], 1.0),
    ("KB per step in collectives", ".1f", lambda row: row["bytes"], 1e-3),
    ("collectives per step", ".0f", lambda row: row["collectives"], 1.0),
    ("Python calls per step", ".0f", lambda row: row["python_calls"], 1.0),
    ("process groups made", ".0f", lambda row: row["groups"], 1.0),
]
"""Tables of a step: title, form of a number, figures of a row, and what they are multiplied by."""

MANIFEST: list[tuple[str, str, Figure, float]] = [
    ("CPU s to write", ".3f", lambda row: row["write_seconds"], 1.0),
    ("CPU s to open", ".3f", lambda row: row["open_seconds"], 1.0),
    ("MB of memory to open", ".1f", lambda row: row["open_mb"], 1.0),
    ("MB of files", ".2f", lambda row: row["file_mb"], 1.0),
]

WATCHDOG: list[tuple[str, str, Figure, float]] = [
    ("calls of the store in a look", ".0f", lambda row: row["store_calls"], 1.0),
    ("CPU ms of a look", ".3f", lambda row: row["check_seconds"], 1e3),
]

START: list[tuple[str, str, Figure, float]] = [
    ("s to the end of the first step", ".2f", lambda row: row["start_seconds"], 1.0),
    ("most calls of the store by a rank", ".0f", lambda row: row["start_calls"], 1.0),
]

SECTIONS = (
    ("step", "A step", STEP),
    ("manifest", "The manifest of a checkpoint", MANIFEST),
    ("watchdog", "The watchdog of a rank that waits", WATCHDOG),
    ("start", "The start of real ranks", START),
)


def name_of(row: Row) -> str:
    """Return what a row is called in tables."""
    return row["library"] + ("" if row["stage"] is None else f", stage {row['stage']}")


def values_of(rows: Iterable[Row], figure: Figure) -> list[float]:
    """Return the figures of all rounds that did not fail."""
    values: list[float] = []
    for row in rows:
        if row["error"] is None:
            value = figure(row)
            values += value if isinstance(value, Sequence) else [value]
    return values


def cell_text(rows: Sequence[Row], figure: Figure, form: str, factor: float) -> str:
    """Return the median over rounds, with the least and the most where they differ."""
    if not rows:
        return "-"
    values = [factor * value for value in values_of(rows, figure)]
    if not values:
        return "failed"
    texts = [format(value, form) for value in (median(values), min(values), max(values))]
    return texts[0] if texts[1] == texts[2] else f"{texts[0]} ({texts[1]} - {texts[2]})"


def table(rows: Sequence[Row], title: str, form: str, figure: Figure, factor: float) -> str:
    """Return a table of one figure: a line per library, a column per number of ranks."""
    worlds = sorted({row["world"] for row in rows if row["library"] != "plain torch"})
    lines = [[title, *(f"{world:,} ranks" for world in worlds)]]
    for name in dict.fromkeys(map(name_of, rows)):
        mine = [row for row in rows if name_of(row) == name]
        if name == "plain torch":
            lines.append([name, cell_text(mine, figure, form, factor), *["-"] * (len(worlds) - 1)])
        else:
            here = ([row for row in mine if row["world"] == world] for world in worlds)
            lines.append([name, *(cell_text(some, figure, form, factor) for some in here)])
    return lines_of(lines)


def cases(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return the rows of each model."""
    models: dict[str, list[Row]] = {}
    for row in rows:
        parameters = f", {row['parameters']:,} parameters" if row["parameters"] else ""
        models.setdefault(f"{row['blocks']} blocks{parameters}" if row["blocks"] else "", []).append(row)
    return models


def failures(rows: Iterable[Row]) -> str:
    """Return a list of the cells that failed."""
    texts = [
        f"- {row['measure']}, {name_of(row)}, {row['world']:,} ranks, {row['blocks']} blocks, "
        f"{row['parameters']:,} parameters: {row['error']}"
        for row in rows
        if row["error"] is not None
    ]
    return "\n".join(dict.fromkeys(texts))


def draw(rows: Sequence[Row], path: Path) -> bool:
    """Draw a panel per model and figure, both axes logarithmic; False where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: matplotlib is not installed; pip install matplotlib", file=sys.stderr)
        return False
    panels: list[tuple[str, str, list[Row], Figure, float]] = []
    for measure, tables in (("step", [STEP[0], STEP[4]]), ("manifest", MANIFEST[1:2]), ("start", START[:1])):
        for title, _, figure, factor in tables:
            some = [row for row in rows if row["measure"] == measure and row["library"] != "plain torch"]
            panels += [(title, model, mine, figure, factor) for model, mine in cases(some).items()]
    if not panels:
        return False
    columns = min(4, len(panels))
    count = -(-len(panels) // columns)
    picture = Figure(figsize=(3.6 * columns, 0.6 + 3.1 * count), layout="constrained")
    FigureCanvasAgg(picture)
    legend: dict[str, Any] = {}
    axes = picture.subplots(count, columns, squeeze=False).flat
    for panel in axes:
        if not panels:
            panel.set_axis_off()
            continue
        title, model, mine, figure, factor = panels.pop(0)
        for name in dict.fromkeys(map(name_of, mine)):
            points = []
            for world in sorted({row["world"] for row in mine}):
                values = values_of((row for row in mine if (name_of(row), row["world"]) == (name, world)), figure)
                points += [(world, factor * median(values))] if values else []
            if points:
                colour, form = STYLES[name]
                worlds, heights = zip(*points, strict=True)
                (legend[name],) = panel.plot(worlds, heights, form, color=colour, markersize=4)
        panel.set(xscale="log", yscale="log", xlabel="ranks")
        panel.set_title(f"{title}\n{model}", fontsize=9)
        panel.grid(alpha=0.3)
    picture.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=len(legend), frameon=False)
    picture.savefig(path, dpi=110)
    return True


def introduction(result: dict[str, Any]) -> str:
    """Return what was measured, on what, and how to read it."""
    return f"""# What grows with the number of ranks, {result["date"]}

Commit {result["commit"]}; {result["machine"]}; torch {result["torch"]}. Made by `python benchmarks/scale.py`; the rows
are in [scale.json](scale.json).

One process is one rank, of torch's fake process group: its collectives return at once and move nothing, so that what is
left is the rank's own work. Times are CPU times of one thread, of rank 0. Each cell runs {result["rounds"]} time(s),
in processes of its own, with {result["steps"]} steps each. The tables have the median, and the least and the most where
they differ.

- The model is blocks of one layer and of vectors with 16 elements, and learns with AdamW: it takes next to no time
  itself (*plain torch*). *Parameters* are tensors.
- **In the fake group**: filling the results of gathers, which a real group does by other means; included in the step.
- **KB per step in collectives** is all memory that one rank gives to collectives, to read or to fill.
- **Manifest**: the description of a checkpoint by so many ranks, of which each has a part of each tensor (three per
  block). With ZeroMesh each rank writes its own list, and the first one the index (*to write* are its list and the
  index); a rank in the middle opens what it needs. DCP's first rank writes metadata for all, which each rank reads.
- **Watchdog**: one look of the rank that reads for all, which has waited for long, with eight ranks on a machine.
- **Start**: real ranks on gloo, forked on this machine with all modules imported, from joining each other to the end of
  the first step of a tiny model. They share its cores. Calls of the store are those of Python."""


def page(result: dict[str, Any], picture: str | None) -> str:
    """Return the whole page, as Markdown."""
    parts = [introduction(result)]
    if picture is not None:
        parts.append(f"![Figures over the number of ranks, log-log]({picture})")
    for measure, heading, tables in SECTIONS:
        rows = [row for row in result["rows"] if row["measure"] == measure]
        for model, mine in cases(rows).items():
            parts.append(f"## {heading}" + (f": {model}" if model else ""))
            parts += [table(mine, *row) for row in tables]
    if problems := failures(result["rows"]):
        parts.append(f"## What failed\n\n{problems}")
    return "\n\n".join(parts) + "\n"


def write_page(path: Path) -> Path:
    """Write the page and the picture beside the JSON file; return the page's path."""
    result = json.loads(path.read_text())
    target, picture = path.with_suffix(".md"), path.with_suffix(".png")
    target.write_text(page(result, picture.name if draw(result["rows"], picture) else None))
    readme = target.with_name("README.md")
    if readme.exists() and f"({target.name})" not in (text := readme.read_text()):
        what = f"what grows with the number of ranks; {result['machine']}"
        readme.write_text(text.replace(LIST, f"{LIST}- [{target.name}]({target.name}): {what}.\n", 1))
    return target


if __name__ == "__main__":
    print(write_page(Path(sys.argv[1])))
