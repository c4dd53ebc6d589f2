"""The picture of a run, finished or not: its attempts, curves, and the ranks' work and hardware over time."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from zeromesh.apps.train.goodput import Attempt, Spent, read_attempts, read_times, totals
from zeromesh.apps.train.metrics import form_of, read_records
from zeromesh.apps.train.run_folder import RunFolder
from zeromesh.base.drawing import ChartPanel, draw_bars, draw_map, draw_panels
from zeromesh.base.words import counted, duration_text

MOST_ATTEMPTS = 40  # the last ones are drawn
KINDS = sorted(Spent, key=lambda kind: kind is not Spent.START)  # within a stretch, of which only the sums are known

_log = logging.getLogger("zeromesh")


def write_picture(run: Path) -> Path:
    """Draw a run from its files, and return the picture's path; raise ValueError without a run, or matplotlib."""
    folder = RunFolder(run)
    (records, others), (times, more) = read_records(folder.metrics, form_of), read_times(folder.times)
    attempts = read_attempts(folder.times)
    if others + more:
        _log.warning("%s: %d lines of its logs are not records of a run, and are left out", run, others + more)
    if not attempts:
        raise ValueError(
            f"{str(folder.times)!r} has no attempt at a run: name the output folder of a run of zeromesh train"
        )
    spent, reached = totals(attempts), max((record["step"] for record in records), default=0)
    total = sum(spent.values()) or 1.0
    title = (
        f"{run.absolute().name}: step {reached}, {counted(len(attempts), 'attempt')} in {duration_text(total)}, of "
        f"which {spent[Spent.STEPS] / total:.0%} went to steps that count"
    )
    draw_panels(folder.picture, title, [*_panels(attempts[-MOST_ATTEMPTS:], records, times)])
    return folder.picture


def _panels(
    attempts: Sequence[Attempt], records: Sequence[dict[str, Any]], times: Sequence[dict[str, Any]]
) -> Iterator[ChartPanel]:
    yield ChartPanel("attempts, seconds by kind of work", max(1.8, 0.3 * len(attempts)), partial(_timeline, attempts))
    by_kind: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        by_kind[record["kind"]].append(record)
    spikes = [record["step"] for record in by_kind["spike"]]
    losses = {"training": by_kind["train"], "held out": by_kind["validation"]}
    yield ChartPanel("loss, nats per token", 2.2, partial(_curves, losses, "loss", spikes))
    for key in ("gradient_norm", "tokens_per_second"):
        yield ChartPanel(key.replace("_", " "), 1.6, partial(_curves, {"": by_kind["train"]}, key, spikes))
    work, hardware = _work_of_ranks(times), _slowness_of_hardware(times)
    for name, rows in (
        ("work of the ranks beside the median of the others", work),
        ("hardware: usual / now", hardware),
    ):
        if len(rows) > 1:
            yield ChartPanel(name, min(6.0, max(1.2, 0.18 * len(rows))), partial(draw_map, rows=rows))


def _timeline(attempts: Sequence[Attempt], axes: Any) -> None:
    bars: defaultdict[str, list[tuple[int, float, float]]] = defaultdict(list)
    for row, attempt in enumerate(attempts):
        for stretch in attempt.stretches:
            place = stretch.begin - attempts[0].began
            for kind in KINDS:
                if (seconds := stretch.seconds.get(kind, 0.0)) > 0.0:
                    bars[kind].append((row, place, seconds))
                    place += seconds
    if bars:
        draw_bars(axes, [f"from step {attempt.step}" for attempt in attempts], bars)


def _curves(curves: dict[str, list[dict[str, Any]]], key: str, spikes: Sequence[int], axes: Any) -> None:
    for name, records in curves.items():
        # What is missing, or not finite, leaves a gap.
        points = [(record["step"], float("nan") if record.get(key) is None else record[key]) for record in records]
        if points:
            axes.plot(*zip(*points, strict=True), linewidth=1, marker="o" if name == "held out" else "", label=name)
    for number, step in enumerate(spikes):
        axes.axvline(step, color="tab:red", linestyle=":", linewidth=1, label="" if number else "spike")
    axes.grid(alpha=0.3)
    if any(name and records for name, records in curves.items()):
        axes.legend(fontsize="small")


def _work_of_ranks(times: Sequence[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Return the seconds of each rank's updates, as multiples of what is usual, by step."""
    rows: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for record in times:
        if "work" in record:  # an elastic run has other numbers of ranks at times
            for rank, (seconds, usual) in enumerate(zip(record["work"], record.get("usual", ()), strict=False)):
                rows[f"rank {rank}"][record["step"]] = seconds / usual if usual else 1.0
    return rows


def _slowness_of_hardware(times: Sequence[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Return the usual speed of what was checked, as multiples of its speed, by step."""
    speeds: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for record in times:
        if "health" in record:
            check, step = record["health"], record["step"]
            for key in ("products", "memory"):
                for rank, speed in enumerate(check[key]):
                    speeds[f"rank {rank}, {key}"][step] = speed
            for first, second, speed in check["links"]:
                speeds[f"link {first} to {second}"][step] = speed
    usual = {name: median(row.values()) for name, row in speeds.items()}
    return {name: {at: usual[name] / speed for at, speed in row.items() if speed} for name, row in speeds.items()}
