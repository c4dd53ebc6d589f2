"""The page of a run, finished or not: its figures, curves, samples, and the ranks' work and hardware over time."""

from __future__ import annotations

import json
import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean, median
from typing import Any

from zeromesh.apps.train.goodput import Attempt, Spent, read_attempts, read_times, totals
from zeromesh.apps.train.metrics import form_of, read_records
from zeromesh.apps.train.run_folder import RunFolder
from zeromesh.apps.train.run_summary import summary
from zeromesh.apps.train.train_settings import ResolvedTrainSettings
from zeromesh.base.chart_page import charts_html, heading, table, texts, tiles, write_page
from zeromesh.base.drawing import Bars, Chart, Curves, Grid, GridCell
from zeromesh.base.files import read_text
from zeromesh.base.lock import is_locked
from zeromesh.base.words import bytes_text, counted, duration_text, scaled_text
from zeromesh.config.printing import jsonable, lines_of

MOST_ATTEMPTS = 40  # the last ones are drawn
RELOAD = 3  # seconds between two looks at a run that is going on, and between two of a browser at its page
KINDS = sorted(Spent, key=lambda kind: kind is not Spent.START)  # within a stretch, of which only the sums are known

MOST_LAYERS = 2  # whose experts are drawn over time, the most uneven ones
EVEN, MOST = 100, 400  # percent of the mean: the ends of the colours of fullest experts

_log = logging.getLogger("zeromesh")


def write_run_page(run: Path, live: bool = False) -> Path:
    """Write a run's page from its files, and return its path; a ``live`` one reloads itself.

    Raises:
        ValueError: the folder has no run.
    """
    folder = RunFolder(run)
    (records, others), (times, more) = read_records(folder.metrics, form_of), read_times(folder.times)
    attempts = read_attempts(folder.times)
    if others + more:
        _log.warning("%s: left out %d lines of its logs that are not records of a run", run, others + more)
    if not attempts:
        is_there = "has no run" if run.is_dir() else "is no folder"
        raise ValueError(f"{str(run)!r} {is_there}: name the folder that run.output of zeromesh train names")
    settings = None
    with suppress(ValueError, OSError):  # of another version, or not written yet
        settings = folder.settings()
    report = _report(folder.report)
    unit = "nats per token" if settings is None or settings.dpo is None else "nats per pair"
    unit = unit if report is None else str(report["loss_unit"])
    steps = [record for record in records if record["kind"] == "train"]
    parts = [
        heading(run.absolute().name, _subtitle(settings, report, steps, live)),
        tiles(_figures(records, attempts)),
        charts_html(charts(attempts[-MOST_ATTEMPTS:], records, times, unit)),
        *([table("Summary", summary(report))] if report is not None else []),
        *([texts("Samples", report["samples"])] if report is not None and report["samples"] else []),
    ]
    if settings is not None:
        changed = lines_of(jsonable(settings.model_dump(exclude_defaults=True)))
        parts.append(texts("Settings you changed", ["\n".join(changed)], folded=True))
    write_page(folder.page, f"{run.absolute().name}: training run", parts, RELOAD if live else None)
    return folder.page


def watch(run: Path) -> Iterator[Path]:
    """Write a run's page anew whenever its files change, until the run ends; yield its path each time."""
    folder, written = RunFolder(run), 0.0
    try:
        while is_locked(run):
            logs = (path for path in (folder.metrics, folder.times) if path.is_file())
            changed = max((path.stat().st_mtime for path in logs), default=0.0)
            if changed > written and read_attempts(folder.times):
                written = changed
                yield write_run_page(run, live=True)
            time.sleep(RELOAD)
    except KeyboardInterrupt:
        if written:
            write_run_page(run)  # a page that nobody writes again must not reload itself
        raise
    yield write_run_page(run)


def _report(path: Path) -> dict[str, Any] | None:
    """Return the report of the run's end, if it has ended and this version wrote it."""
    with suppress(ValueError, OSError, KeyError, TypeError, AttributeError, RecursionError):
        report: dict[str, Any] = json.loads(read_text(path))
        summary(report)
        return report
    return None


def _subtitle(
    settings: ResolvedTrainSettings | None,
    report: Mapping[str, Any] | None,
    steps: Sequence[Mapping[str, Any]],
    live: bool,
) -> str:
    words = []
    if report is not None:
        words.append(f"{report['architecture']}, {scaled_text(report['parameters'])} parameters")
    elif settings is not None and settings.huggingface is not None:
        words.append(settings.huggingface.path)
    elif settings is not None and settings.model is not None:
        shape = settings.model
        words.append(f"{shape.architecture}, {counted(shape.layers, 'block')} of width {shape.hidden_size}")
    if settings is not None:
        mesh = [f"{axis} {size}" for axis, size in settings.mesh.model_dump().items() if size not in (None, 1)]
        words += [f"ZeRO-{settings.zero_optimization.stage}", *mesh]
    step = steps[-1]["step"] if steps else 0
    wanted = f" of {settings.run.steps}" if settings is not None and settings.run is not None else ""
    state = "running, this page reloads itself" if live else "ended" if report is not None else "not finished"
    return ", ".join([*words, f"step {step}{wanted}: {state}"])


def _figures(records: Sequence[Mapping[str, Any]], attempts: Sequence[Attempt]) -> dict[str, str]:
    """Return the figures at the head of the page, as they are now."""
    figures = {}
    train = [record for record in records if record["kind"] == "train"]
    held_out = [record for record in records if record["kind"] == "validation"]
    if train:
        last = train[-1]
        figures["training loss"] = f"{last['loss']:.3f}"
        if held_out:
            figures["held-out loss"] = f"{held_out[-1]['loss']:.3f}"
        if isinstance(rate := last.get("tokens_per_second"), int | float):
            figures["speed"] = scaled_text(rate, "tok/s")
        if isinstance(share := last.get("utilization"), int | float):
            figures["MFU"] = f"{share:.0%}"
        if isinstance(memory := last.get("memory"), int | float):
            figures["peak memory"] = bytes_text(memory)
    spent = totals([*attempts])
    total = sum(spent.values()) or 1.0
    figures["time" if len(attempts) == 1 else f"time of {len(attempts)} attempts"] = duration_text(total)
    figures["in steps that count"] = f"{spent[Spent.STEPS] / total:.0%}"
    return figures


def charts(
    attempts: Sequence[Attempt],
    records: Sequence[dict[str, Any]],
    times: Sequence[dict[str, Any]],
    loss_unit: str = "nats per token",
) -> Iterator[Chart]:
    """Yield the charts of a run."""
    by_kind: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        by_kind[record["kind"]].append(record)
    spikes = [record["step"] for record in by_kind["spike"]]
    losses = {"training": by_kind["train"], "held out": by_kind["validation"]}
    curves = {name: _points(rows, "loss") for name, rows in losses.items() if rows}
    yield Curves(f"loss, {loss_unit}", curves, points=frozenset({"held out"}), marks=spikes, mark="spike")
    for key, title, unit in (
        ("tokens_per_second", "speed, tokens per second", "tok/s"),
        ("utilization", "MFU, %", "%"),
        ("gradient_norm", "gradient norm", ""),
        ("learning_rate", "learning rate", ""),
    ):
        if any(key in record for record in by_kind["train"]):
            points = {"": _points(by_kind["train"], key)}
            yield Curves(title, points, unit=unit, from_zero=True, marks=spikes, mark="spike")
    yield from expert_charts(by_kind["experts"])
    yield _timeline(attempts)
    work, hardware = _work_of_ranks(times), _slowness_of_hardware(times)
    for name, rows in (
        ("work of each rank, beside the median of the others; orange: slower", work),
        ("hardware, beside its usual speed; orange: slower", hardware),
    ):
        if len(rows) > 1:
            yield _ratios(name, rows)


def _points(records: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    # What is missing, or not finite, leaves a gap.
    values = [(record["step"], record.get(key)) for record in records]
    scale = 100 if key == "utilization" else 1
    return [(step, scale * value if isinstance(value, int | float) else float("nan")) for step, value in values]


def _timeline(attempts: Sequence[Attempt]) -> Bars:
    bars: defaultdict[str, list[tuple[int, float, float]]] = defaultdict(list)
    for row, attempt in enumerate(attempts):
        for stretch in attempt.stretches:
            place = stretch.begin - attempts[0].began
            for kind in KINDS:
                if (seconds := stretch.seconds.get(kind, 0.0)) > 0.0:
                    bars[kind].append((row, place, seconds))
                    place += seconds
    bars_by_kind = {str(kind): bars[kind] for kind in Spent if kind in bars}
    return Bars("attempts, by what time went to", [f"from step {attempt.step}" for attempt in attempts], bars_by_kind)


def _ratios(title: str, rows: Mapping[str, Mapping[int, float]]) -> Grid:
    """Return a ratio for each row and step, from 1 (light) to 2 (dark)."""
    steps = sorted({step for row in rows.values() for step in row})
    cells = {
        (number, column): GridCell(ratio - 1.0, hover=f"{name}, step {step}: {ratio:.2f} times as long")
        for number, (name, row) in enumerate(rows.items())
        for column, step in enumerate(steps)
        if (ratio := row.get(step)) is not None
    }
    return Grid(title, [*rows], [f"step {step}" for step in steps], cells, hue="orange")


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


# How evenly experts were used: by layer and expert, over time.


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
