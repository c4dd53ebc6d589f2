"""Pictures of several panels, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zeromesh.base.requirements import pip_install

WIDTH = 12.0  # inches
MOST_NAMES = 48  # beside a map, which can be read


class ChartPanel(NamedTuple):
    """One part of a picture; the parts stand below each other."""

    title: str
    height: float  # inches
    draw: Callable[[Any], None]  # into axes of matplotlib


def require_matplotlib() -> Any:
    """Return matplotlib's class of figures, which leaves the user's backend alone; raise ValueError without it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"a picture needs matplotlib ({error}): {pip_install('matplotlib')}") from None
    return Figure


def draw_panels(path: Path, title: str, panels: Sequence[ChartPanel]) -> None:
    """Write a picture, in the format of the end of its name; raise ValueError without matplotlib or for another end."""
    figure = require_matplotlib()(figsize=(WIDTH, 0.5 + sum(panel.height for panel in panels)), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", parse_math=False)
    ratios = {"height_ratios": [panel.height for panel in panels]}
    axes = figure.subplots(len(panels), gridspec_kw=ratios, squeeze=False)[:, 0]
    for panel, place in zip(panels, axes, strict=True):
        place.set_title(panel.title, loc="left", fontsize="medium", parse_math=False)
        panel.draw(place)
    figure.savefig(path, dpi=120)


def draw_bars(axes: Any, rows: Sequence[str], bars: Mapping[str, Sequence[tuple[int, float, float]]]) -> None:
    """Draw bars in named rows from above; ``bars`` has row, start and length of each, by what its colour stands for."""
    from matplotlib import colormaps

    for number, (kind, places) in enumerate(bars.items()):
        for row in sorted({row for row, _, _ in places}):
            spans = [(start, length) for place, start, length in places if place == row]
            axes.broken_barh(spans, (row - 0.4, 0.8), color=colormaps["tab10"](number % 10), label=kind)
            kind = ""  # named once
    axes.set_yticks(range(len(rows)), rows, fontsize="small")
    axes.invert_yaxis()
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small", frameon=False)


def draw_map(axes: Any, rows: Mapping[str, Mapping[int, float]]) -> None:
    """Draw a ratio for each row and step, from 1 (light) to 2 (dark)."""
    steps = sorted({step for row in rows.values() for step in row})
    table = [[row.get(step, float("nan")) for step in steps] for row in rows.values()]
    image = axes.imshow(table, aspect="auto", vmin=1.0, vmax=2.0, cmap="OrRd", interpolation="nearest")
    if len(rows) <= MOST_NAMES:
        axes.set_yticks(range(len(rows)), rows, fontsize="small")
    ends = sorted({0, len(steps) - 1})
    axes.set_xticks(ends, [f"step {steps[place]}" for place in ends])
    axes.figure.colorbar(image, ax=axes, extend="max", pad=0.01)
