"""Pictures of when each rank does what: text, SVG, and traces for Perfetto or chrome://tracing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any
from xml.sax.saxutils import escape

from zeromesh.parallel.pipeline.schedule.actions import Kind
from zeromesh.parallel.pipeline.schedule.simulate import TimedAction, Timeline

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


def _label(timeline: Timeline, step: TimedAction) -> str:
    """Return the kind and the micro-batch, and a letter for the chunk where ranks have several."""
    several = timeline.schedule.stages > len(timeline.ranks)
    kind = "R" if step.action.kind is Kind.RECOMPUTE else step.action.kind
    return f"{kind}{step.action.microbatch}" + (chr(ord("a") + _chunk(timeline, step) % 26) if several else "")


def grid(timeline: Timeline, width: int | None = None) -> str:
    """Return text with a row per rank and a column per shortest computation; beyond ``width`` it goes on below."""
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


@dataclass(frozen=True)
class Panel:
    """One of several timelines on one axis; ``notes`` stand behind the rows of its ranks."""

    timeline: Timeline
    title: str = ""
    notes: Sequence[str] = ()


def _tick(longest: float) -> float:
    """Return a round number, of which six to fifteen are in the longest timeline."""
    least = longest / 15 or 1.0
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def svg(drawn: Sequence[Panel], title: str = "", is_seconds: bool = False) -> str:
    """Return an SVG of timelines one above the other, on one axis; a tooltip names each action and its times.

    Times are in seconds and shown in ms if ``is_seconds``; else they have no unit.
    """
    left, high, gap = 58, 26, 4
    factor, unit = (1e3, " ms") if is_seconds else (1.0, "")
    longest = max((panel.timeline.makespan for panel in drawn), default=0.0) or 1.0
    steps = [step for panel in drawn for row in panel.timeline.computed for step in row]
    # Measured times fill a page. Given costs are multiples of each other, so boxes get one width, with room for a
    # number.
    scale = 1000 / longest if is_seconds else 26 / min((step.end - step.start for step in steps), default=1.0)
    wide, right = round(longest * scale), 130 if any(panel.notes for panel in drawn) else 10
    present = {step.action.kind for step in steps}
    kinds = [kind for kind in COLOURS if kind in present]  # in the order of the legend
    style = " ".join(f".{kind}{{fill:{COLOURS[kind][1]};stroke:#444;stroke-width:.4}}" for kind in kinds)
    parts = [f'<text x="{left}" y="20" style="font-size:14px">{escape(title)}</text>'] if title else []
    y = 34 if title else 10
    for panel in drawn:
        if panel.title:
            parts.append(f'<text x="{left}" y="{y + 12}" style="font-size:12px">{escape(panel.title)}</text>')
            y += 20
        for rank, (row, note) in enumerate(zip(panel.timeline.computed, panel.notes or repeat(""), strict=False)):
            parts.append(f'<text x="8" y="{y + 17}">rank {rank}</text>')
            if note:
                parts.append(f'<text x="{left + wide + 8}" y="{y + 17}">{escape(note)}</text>')
            parts.append(f'<rect x="{left}" y="{y}" width="{wide}" height="{high}" fill="#f1f1f1"/>')
            for step in row:
                x, size = left + step.start * scale, (step.end - step.start) * scale
                label = str(step.action.microbatch)
                shade = (1.0, 0.6, 0.35)[min(_chunk(panel.timeline, step), 2)]  # later chunks are paler
                look = f'class="{step.action.kind}"' + (f' fill-opacity="{shade}"' if shade < 1 else "")
                text = f'<text class="n" x="{x + size / 2:.2f}" y="{y + 17}">{label}</text>'
                parts.append(
                    f"<g><title>{step.action}: {factor * step.start:.6g} to {factor * step.end:.6g}{unit}</title>"
                    f'<rect {look} x="{x:.2f}" y="{y}" width="{size:.2f}" height="{high}"/>'
                    f"{text if size >= 7 * len(label) else ''}</g>"
                )
            y += high + gap
        y += 8
    tick = _tick(longest)
    for count in range(int(longest / tick) + 1):
        x = left + count * tick * scale
        parts.append(f'<line x1="{x:.2f}" y1="{y - 8}" x2="{x:.2f}" y2="{y - 3}" stroke="#444"/>')
        parts.append(f'<text class="n" x="{x:.2f}" y="{y + 8}">{factor * count * tick:g}{"" if count else unit}</text>')
    y += 20
    for number, kind in enumerate(kinds):
        x = left + 150 * number
        parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="14" height="14"/>')
        parts.append(f'<text x="{x + 20}" y="{y + 11}">{COLOURS[kind][0]}</text>')
    width, height = max(left + wide + right, left + 150 * len(kinds)), y + 24
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<style>text{{font:11px sans-serif}} .n{{text-anchor:middle}} {style}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    return "\n".join([*head, *parts, "</svg>"]) + "\n"


def trace(
    processes: Mapping[str, Iterable[TimedAction]], waits: Mapping[str, Iterable[TimedAction]] | None = None
) -> dict[str, Any]:
    """Return a trace for Perfetto, from times in seconds: a process per name, a thread per rank.

    ``waits`` has the waits for messages of a process, each with the action that waited.
    """
    events: list[dict[str, Any]] = []
    for number, (name, steps) in enumerate(processes.items()):
        events.append({"ph": "M", "pid": number, "name": "process_name", "args": {"name": name}})
        waiting, listed = list((waits or {}).get(name, ())), list(steps)
        for rank in sorted({step.rank for step in listed}):
            named = {"name": f"rank {rank}"}
            events.append({"ph": "M", "pid": number, "tid": rank, "name": "thread_name", "args": named})
        for step, is_wait in [*((step, False) for step in listed), *((step, True) for step in waiting)]:
            kind, stage, microbatch = step.action
            text, category = (f"wait for {step.action}", "wait") if is_wait else (str(step.action), kind.name.lower())
            events.append(
                {
                    "ph": "X",
                    "pid": number,
                    "tid": step.rank,
                    "name": text,
                    "cat": category,
                    "ts": step.start * 1e6,
                    "dur": (step.end - step.start) * 1e6,  # the format counts in microseconds
                    "args": {"stage": stage, "microbatch": microbatch},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
