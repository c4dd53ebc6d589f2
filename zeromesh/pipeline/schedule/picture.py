"""Pictures of when each rank does what: text, SVG, PNG, and traces for Perfetto or chrome://tracing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from zeromesh.pipeline.schedule.actions import Kind
from zeromesh.pipeline.schedule.simulate import TimedAction, Timeline

COLOURS = {
    Kind.FORWARD: ("forward", "#7fb2e5"),
    Kind.BACKWARD: ("backward", "#f2a65a"),
    Kind.INPUT: ("input gradient", "#f2a65a"),
    Kind.WEIGHT: ("weight gradient", "#8fc98b"),
    Kind.RECOMPUTE: ("recompute", "#c9b6e4"),
}

IDLE, GOES_ON = "·", "─"


def _chunk(timeline: Timeline, step: TimedAction) -> int:
    return step.action.stage // len(timeline.ranks)


def _shade(timeline: Timeline, step: TimedAction) -> float:
    """Later chunks are paler."""
    return (1.0, 0.6, 0.35)[min(_chunk(timeline, step), 2)]


def _number(value: float) -> str:
    """Return a number with as few digits as a picture needs."""
    return f"{value:.1f}".removesuffix(".0")


def _label(timeline: Timeline, step: TimedAction) -> str:
    """Kind and micro-batch, and a letter for the chunk where ranks have several."""
    several = timeline.schedule.stages > len(timeline.ranks)
    kind = "R" if step.action.kind is Kind.RECOMPUTE else step.action.kind
    return f"{kind}{step.action.microbatch}" + (chr(ord("a") + _chunk(timeline, step) % 26) if several else "")


def grid(timeline: Timeline, width: int | None = None) -> str:
    """One row per rank, one column per shortest computation; where several stages are on a rank, a, b, ... says which.

    Args:
        timeline: of a simulation.
        width: characters of a line; what is longer goes on below. Everything is in one line if left out.
    """
    rows = timeline.computed
    steps = [step for row in rows for step in row]
    if not steps:
        return ""
    unit = min(step.end - step.start for step in steps)
    wide = max(len(_label(timeline, step)) for step in steps) + 1

    def column(time: float) -> int:
        return int(round(time / unit, 6) + 0.5)  # so that no error of rounding makes a column too few

    columns = max(column(step.end) for step in steps)
    lines = []
    for row in rows:
        line = list(IDLE.ljust(wide) * columns)
        for step in row:
            begin, end = column(step.start) * wide, column(step.end) * wide
            line[begin:end] = (_label(timeline, step).ljust(end - begin - 1, GOES_ON) + " ").ljust(end - begin)
        lines.append("".join(line))
    names = [f"rank {rank} " for rank in range(len(rows))]
    edge = max(map(len, names))
    part = columns * wide if width is None else max((width - edge) // wide, 1) * wide
    blocks = [
        "\n".join(
            f"{name:<{edge}}{line[begin : begin + part]}".rstrip() for name, line in zip(names, lines, strict=True)
        )
        for begin in range(0, columns * wide, part)
    ]
    return "\n\n".join(blocks) + "\n"


def svg(timeline: Timeline, title: str = "") -> str:
    """A picture of its own, with a legend; a tooltip names each action and its times."""
    rows = timeline.computed
    steps = [step for row in rows for step in row]
    unit = min((step.end - step.start for step in steps), default=1.0)
    scale = 26 / unit
    left, top, high, gap = 58, 34 if title else 10, 26, 4
    kinds = _kinds(steps)
    width = round(max(left + timeline.makespan * scale + 10, left + 150 * len(kinds)))
    height = top + len(rows) * (high + gap) + 34
    style = " ".join(f".{kind}{{fill:{COLOURS[kind][1]};stroke:#444;stroke-width:.6}}" for kind in kinds)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<style>text{{font:11px sans-serif}} .n{{text-anchor:middle}} {style}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    if title:
        parts.append(f'<text x="{left}" y="20" style="font-size:14px">{escape(title)}</text>')
    for rank, row in enumerate(rows):
        y = top + rank * (high + gap)
        parts.append(f'<text x="8" y="{y + 17}">rank {rank}</text>')
        parts.append(
            f'<rect x="{left}" y="{y}" width="{_number(timeline.makespan * scale)}" height="{high}" fill="#f1f1f1"/>'
        )
        for step in row:
            x, wide, shade = left + step.start * scale, (step.end - step.start) * scale, _shade(timeline, step)
            look = f'class="{step.action.kind}"' + (f' fill-opacity="{shade}"' if shade < 1 else "")
            parts.append(
                f"<g><title>{step.action}: {step.start:g} to {step.end:g}</title>"
                f'<rect {look} x="{_number(x)}" y="{y}" width="{_number(wide)}" height="{high}"/>'
                f'<text class="n" x="{_number(x + wide / 2)}" y="{y + 17}">{step.action.microbatch}</text></g>'
            )
    for number, kind in enumerate(kinds):
        x, y = left + 150 * number, height - 24
        parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="14" height="14"/>')
        parts.append(f'<text x="{x + 20}" y="{y + 11}">{COLOURS[kind][0]}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


@dataclass(frozen=True)
class Panel:
    """One of several timelines on one axis.

    Attributes:
        title: what it is.
        timeline: in seconds.
        notes: of each rank, what stands after its row.
    """

    title: str
    timeline: Timeline
    notes: Sequence[str]


def _tick(longest: float) -> float:
    """A round number of seconds, of which six to fifteen are in the longest timeline."""
    least = longest / 15 or 1.0
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def panels(drawn: Sequence[Panel], title: str = "") -> str:
    """Timelines one above the other, on one axis; a tooltip names each action and its times."""
    left, right, high, gap, wide = 58, 130, 26, 4, 1000
    rows = [panel.timeline.computed for panel in drawn]
    longest = max((panel.timeline.makespan for panel in drawn), default=0.0) or 1.0
    scale = wide / longest
    kinds = _kinds(step for panel in rows for row in panel for step in row)
    style = " ".join(f".{kind}{{fill:{COLOURS[kind][1]};stroke:#444;stroke-width:.4}}" for kind in kinds)
    parts = [f'<text x="{left}" y="20" style="font-size:14px">{escape(title)}</text>'] if title else []
    y = 34 if title else 10
    for panel, computed in zip(drawn, rows, strict=True):
        parts.append(f'<text x="{left}" y="{y + 12}" style="font-size:12px">{escape(panel.title)}</text>')
        y += 20
        for rank, (row, note) in enumerate(zip(computed, panel.notes, strict=True)):
            parts.append(f'<text x="8" y="{y + 17}">rank {rank}</text>')
            parts.append(f'<text x="{left + wide + 8}" y="{y + 17}">{escape(note)}</text>')
            parts.append(f'<rect x="{left}" y="{y}" width="{wide}" height="{high}" fill="#f1f1f1"/>')
            for step in row:
                x, size, shade = (
                    left + step.start * scale,
                    (step.end - step.start) * scale,
                    _shade(panel.timeline, step),
                )
                label = str(step.action.microbatch)
                look = f'class="{step.action.kind}"' + (f' fill-opacity="{shade}"' if shade < 1 else "")
                text = f'<text class="n" x="{x + size / 2:.2f}" y="{y + 17}">{label}</text>'
                parts.append(
                    f"<g><title>{step.action}: {1e3 * step.start:.3f} to {1e3 * step.end:.3f} ms</title>"
                    f'<rect {look} x="{x:.2f}" y="{y}" width="{size:.2f}" height="{high}"/>'
                    f"{text if size >= 7 * len(label) else ''}</g>"
                )
            y += high + gap
        y += 8
    tick = _tick(longest)
    for count in range(int(longest / tick) + 1):
        x = left + count * tick * scale
        parts.append(f'<line x1="{x:.2f}" y1="{y - 8}" x2="{x:.2f}" y2="{y - 3}" stroke="#444"/>')
        unit = " ms" if count == 0 else ""
        parts.append(f'<text class="n" x="{x:.2f}" y="{y + 8}">{1e3 * count * tick:g}{unit}</text>')
    y += 20
    for number, kind in enumerate(kinds):
        x = left + 150 * number
        parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="14" height="14"/>')
        parts.append(f'<text x="{x + 20}" y="{y + 11}">{COLOURS[kind][0]}</text>')
    width, height = left + wide + right, y + 24
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<style>text{{font:11px sans-serif}} .n{{text-anchor:middle}} {style}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    return "\n".join([*head, *parts, "</svg>"]) + "\n"


def panels_png(path: Path, drawn: Sequence[Panel], title: str = "") -> bool:
    """The same picture through matplotlib. Returns whether that was there to do it."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        return False
    longest = max((panel.timeline.makespan for panel in drawn), default=0.0) or 1.0
    ranks = max(len(panel.timeline.ranks) for panel in drawn)
    figure = Figure(figsize=(14, len(drawn) * (ranks * 0.35 + 0.6) + 0.8), layout="constrained")
    FigureCanvasAgg(figure)
    places = figure.subplots(len(drawn), 1, sharex=True, squeeze=False)[:, 0]
    kinds = _kinds(step for panel in drawn for row in panel.timeline.computed for step in row)
    for axes, panel in zip(places, drawn, strict=True):
        for rank, row in enumerate(panel.timeline.computed):
            for step in row:
                _draw(axes, panel.timeline, step, rank, 1e3)
                if (step.end - step.start) / longest * 1000 >= 7 * len(str(step.action.microbatch)):
                    _write(axes, step, rank, 1e3)
            axes.text(1.005, rank, panel.notes[rank], transform=axes.get_yaxis_transform(), va="center", fontsize=8)
        axes.set(xlim=(0, 1e3 * longest), ylim=(len(panel.timeline.ranks) - 0.5, -0.5))
        axes.set_title(panel.title, loc="left", fontsize=10)
        axes.set_yticks(range(len(panel.timeline.ranks)), [f"rank {n}" for n in range(len(panel.timeline.ranks))])
    places[-1].set_xlabel("ms")
    figure.suptitle(title)
    handles = [Patch(facecolor=COLOURS[kind][1], label=COLOURS[kind][0]) for kind in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=max(len(handles), 1))
    figure.savefig(path, dpi=120)
    return True


def _kinds(steps: Iterable[TimedAction]) -> list[Kind]:
    """Return the kinds of computations, in the order of the legend."""
    present = {step.action.kind for step in steps}
    return [kind for kind in COLOURS if kind in present]


def _draw(axes: Any, timeline: Timeline, step: TimedAction, row: int, unit: float = 1.0) -> None:
    """A computation's box."""
    from matplotlib.patches import Rectangle

    place, size = (unit * step.start, row - 0.45), (unit * (step.end - step.start), 0.9)
    colour, alpha = COLOURS[step.action.kind][1], _shade(timeline, step)
    axes.add_patch(Rectangle(place, *size, facecolor=colour, alpha=alpha, edgecolor="#444444"))


def _write(axes: Any, step: TimedAction, row: int, unit: float = 1.0) -> None:
    """The number of the micro-batch in the middle of its box."""
    middle = unit * (step.start + step.end) / 2
    axes.text(middle, row, str(step.action.microbatch), ha="center", va="center", fontsize=7)


def png(path: Path, timeline: Timeline, title: str = "") -> bool:
    """The same picture through matplotlib. Returns whether that was there to do it."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        return False
    rows = timeline.computed
    unit = min((step.end - step.start for row in rows for step in row), default=1.0)
    columns = max(timeline.makespan / unit, 10)
    figure = Figure(figsize=(min(columns * 0.28 + 1, 60), len(rows) * 0.35 + 1.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    kinds = dict(COLOURS[kind] for kind in _kinds(step for row in rows for step in row))
    for rank, row in enumerate(rows):
        for step in row:
            _draw(axes, timeline, step, rank)
            _write(axes, step, rank)
    axes.set(xlim=(0, timeline.makespan or 1), ylim=(len(rows) - 0.5, -0.5), xlabel="time", title=title)
    axes.set_yticks(range(len(rows)), [f"rank {rank}" for rank in range(len(rows))])
    handles = [Patch(facecolor=colour, label=name) for name, colour in kinds.items()]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=max(len(handles), 1))
    figure.savefig(path, dpi=120)
    return True


def trace(
    processes: Mapping[str, Iterable[TimedAction]], waits: Mapping[str, Iterable[TimedAction]] | None = None
) -> dict[str, Any]:
    """Return a trace for Perfetto: a process per name, such as "predicted" and "measured", a thread per rank.

    Args:
        processes: name -> what was done and when, in seconds.
        waits: name -> when ranks waited for a message, before which action.
    """
    events: list[dict[str, Any]] = []
    for number, (name, steps) in enumerate(processes.items()):
        events.append({"ph": "M", "pid": number, "name": "process_name", "args": {"name": name}})
        listed = list(steps)
        for rank in sorted({step.rank for step in listed}):
            named = {"name": f"rank {rank}"}
            events.append({"ph": "M", "pid": number, "tid": rank, "name": "thread_name", "args": named})
        waiting = list((waits or {}).get(name, ()))
        for step, is_wait in [*((step, False) for step in listed), *((step, True) for step in waiting)]:
            kind, stage, microbatch = step.action
            named = (
                {"name": f"wait for {step.action}", "cat": "wait"}
                if is_wait
                else {"name": str(step.action), "cat": kind.name.lower()}
            )
            events.append({
                "ph": "X", "pid": number, "tid": step.rank, **named,
                "ts": step.start * 1e6, "dur": (step.end - step.start) * 1e6,
                "args": {"stage": stage, "microbatch": microbatch},
            })  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms"}
