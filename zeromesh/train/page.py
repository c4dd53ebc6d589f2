"""The page of a run, finished or not: its attempts, curves, and the ranks' work and hardware over time."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from zeromesh.model.files import read_text, write_text
from zeromesh.observe.metrics import form_of, read_records
from zeromesh.observe.svg import COLOURS, LEFT, RIGHT, WIDTH, box, html_page, label, legend, svg
from zeromesh.observe.units import duration_text, scaled_text
from zeromesh.train.folder import RunFolder
from zeromesh.train.goodput import COLOURS as KINDS
from zeromesh.train.goodput import Attempt, Spent, Stretch, read_attempts, read_times, totals

MOST_POINTS = 600  # of a curve
MOST_COLUMNS = 160  # of a map
MOST_ROWS = 48
MOST_STRETCHES = 600  # of a timeline
LONG_NAMES = 210  # pixels for the names of a map's rows

PAGE = "report.html"

_log = logging.getLogger("zeromesh")


def write_page(run: Path) -> Path:
    """Write the page of a run from its files, and return its path; raise ValueError if no run is there."""
    folder = RunFolder(run)
    (records, others), (times, more) = read_records(folder.metrics, form_of), read_times(folder.times)
    attempts = read_attempts(folder.times)
    if others + more:
        _log.warning("%s: %d lines of its logs are no records of a run, and are left out", run, others + more)
    if not attempts:
        raise ValueError(
            f"{str(folder.times)!r} has no attempt at a run: name the output folder of a run of zeromesh train"
        )
    steps, spikes = ([record for record in records if record["kind"] == kind] for kind in ("train", "spike"))
    validations = [record for record in records if record["kind"] == "validation"]
    parts = [f"<h1>{escape(run.absolute().name)}</h1>", _state(folder, attempts, steps)]
    parts += ["<h2>Time of all attempts</h2>", _shares(attempts), timeline(attempts)]
    if spikes:
        parts += ["<h2>Spikes</h2>", _table([SPIKE_COLUMNS, *spike_rows(spikes)])]
    curves = {"training": _curve(steps, "loss"), "held out": _curve(validations, "loss")}
    parts += ["<h2>Loss, nats per token</h2>", line_chart(curves)]
    for title, key in (("Gradient norm", "gradient_norm"), ("Tokens per second", "tokens_per_second")):
        parts += [f"<h2>{title}</h2>", line_chart({"": _curve(steps, key)})]
    parts += _ranks(times)
    write_text(run / PAGE, html_page(f"Run {run.absolute().name}", parts))
    return run / PAGE


def _curve(records: Sequence[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    """Return the finite values by step; those of skipped updates are infinite or NaN."""
    points = ((record["step"], record.get(key)) for record in records)
    return [(step, value) for step, value in points if value is not None and isfinite(value)]


def _state(folder: RunFolder, attempts: Sequence[Attempt], steps: Sequence[dict[str, Any]]) -> str:
    reached = steps[-1]["step"] if steps else 0
    spent = totals([*attempts])
    total = sum(spent.values()) or 1.0
    try:
        wanted = int(json.loads(read_text(folder.config))["run"]["steps"])
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        OverflowError,
        RecursionError,
    ):  # a run that has just begun, or a damaged file
        wanted = reached
    ended = "has ended" if folder.has_finished and reached >= wanted else "has not reached its end"
    return (
        f"<p>The run {ended}: step {reached} of {wanted}, {len(attempts)} attempt{'s' * (len(attempts) > 1)} in "
        f"{duration_text(total)}, of which {spent[Spent.STEPS] / total:.0%} went to steps that count (goodput).</p>"
    )


def _shares(attempts: Sequence[Attempt]) -> str:
    spent = totals([*attempts])
    total = sum(spent.values()) or 1.0
    rows = "".join(
        f'<tr><td>{kind}</td><td class="n">{spent[kind]:.1f} s</td><td class="n">{spent[kind] / total:.1%}</td></tr>'
        for kind in Spent if spent[kind] > 0.0
    )  # fmt: skip
    return f"<table>{rows}</table>"


def timeline(attempts: Sequence[Attempt]) -> str:
    """Return a picture with a row for each attempt, by kind of work."""
    begin = attempts[0].began
    end = max(max(attempt.last for attempt in attempts), begin + 1e-3)
    width, high, top, body, seen = WIDTH - LEFT - RIGHT, 26.0, 8.0, [], set[Spent]()
    for row, attempt in enumerate(attempts):
        y = top + high * row
        body.append(label(LEFT - 8, y + 16, f"step {attempt.step}", "end"))
        for stretch in _merged(attempt.stretches, MOST_STRETCHES // len(attempts)):
            # Within a stretch only the sums are known, so its kinds are drawn one after the other, the start first.
            at = stretch.begin
            for kind in sorted(Spent, key=lambda work: work is not Spent.START):
                if (seconds := stretch.seconds.get(kind, 0.0)) > 0.0:
                    x, wide = LEFT + width * (at - begin) / (end - begin), width * seconds / (end - begin)
                    title = f"{kind}: {seconds:.1f} s, up to step {stretch.step}"
                    body.append(box(x, y, wide, high - 5, KINDS[[*Spent].index(kind)], title))
                    at += seconds
                    seen.add(kind)
    bottom = top + high * len(attempts)
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        body.append(label(LEFT + width * share, bottom + 16, duration_text((end - begin) * share), anchor))
    kinds = [kind for kind in Spent if kind in seen]
    body += legend([*map(str, kinds)], top, [KINDS[[*Spent].index(kind)] for kind in kinds])
    return svg(max(bottom + 24, top + 18 * len(kinds) + 10), body)


def _merged(stretches: Sequence[Stretch], most: int) -> list[Stretch]:
    """Return the stretches with neighbours put together, so that there are not many more than ``most``."""
    step, merged = -(-len(stretches) // max(1, most)), []
    for begin in range(0, len(stretches), max(1, step)):
        part = stretches[begin : begin + step]
        seconds = {kind: sum(stretch.seconds.get(kind, 0.0) for stretch in part) for kind in Spent}
        merged.append(Stretch(part[0].begin, part[-1].end, part[-1].step, seconds))
    return merged


SPIKE_COLUMNS = ("step", "of", "value", "median before", "what was done")


def spike_rows(spikes: Sequence[dict[str, Any]]) -> Iterator[Sequence[str]]:
    """Yield the cells of ``SPIKE_COLUMNS`` for each spike."""
    for spike in spikes:
        done = "left out" if spike["skipped"] else "logged"
        done += f"; the run went back to {spike['back']}" if spike["back"] else ""
        yield str(spike["step"]), spike["name"], f"{spike['value']:.4g}", f"{spike['usual']:.4g}", done


def _table(rows: Iterable[Sequence[str]]) -> str:
    """Return a table, of which the first row is the header."""
    cells = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    cells[0] = cells[0].replace("td>", "th>")
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def line_chart(curves: dict[str, list[tuple[int, float]]]) -> str:
    """Return a picture of values over steps, with a line for each curve."""
    curves = {name: _thinned(points) for name, points in curves.items() if points}
    every = [point for points in curves.values() for point in points]
    if len({step for step, _ in every}) < 2:
        return "<p>There are too few values to draw.</p>"
    steps, values = [step for step, _ in every], [value for _, value in every]
    first, last, low, high = min(steps), max(steps), min(values), max(values)
    spread = (high - low) or abs(high) or 1.0
    width, tall, top, body = WIDTH - LEFT - RIGHT, 180.0, 10.0, []
    for share in (0.0, 0.5, 1.0):
        y = top + tall * (1 - share)
        body.append(f'<line x1="{LEFT}" x2="{LEFT + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        body.append(label(LEFT - 8, y + 4, scaled_text(low + spread * share), "end"))
        body.append(label(LEFT + width * share, top + tall + 18, f"{first + (last - first) * share:.0f}", "middle"))
    for number, points in enumerate(curves.values()):
        places = " ".join(
            f"{LEFT + width * (step - first) / (last - first):.1f},{top + tall * (1 - (value - low) / spread):.1f}"
            for step, value in points
        )
        colour = COLOURS[(0, 4)[number % 2]]
        body.append(f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    named = [name for name in curves if name]
    return svg(top + tall + 26, [*body, *legend(named, top, (COLOURS[0], COLOURS[4]))])


def _thinned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return at most ``MOST_POINTS``, of each stretch the lowest and the highest, so that no spike is lost."""
    step = -(-2 * len(points) // MOST_POINTS)
    if step <= 2:
        return points
    thinned = []
    for begin in range(0, len(points), step):
        part = points[begin : begin + step]
        thinned += sorted({min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])})
    return thinned


def _ranks(times: Sequence[dict[str, Any]]) -> list[str]:
    """Return the parts on the ranks' work, and on the checks of their hardware."""
    parts = []
    seen = [record for record in times if "work" in record and len(record["work"]) == len(record.get("usual", ()))]
    ranks = max((len(record["work"]) for record in seen), default=0)  # an elastic run has others at times
    if ranks > 1:
        shown = []
        for record in seen:
            pairs = zip(record["work"], record["usual"], strict=True)
            cells = [(seconds / usual if usual else 1.0, f"{1e3 * seconds:.1f} ms") for seconds, usual in pairs]
            shown.append((record["step"], cells + [(0.0, "none")] * (ranks - len(cells))))
        text = (
            "Seconds of an update without waits for other ranks; dark ranks work longer than the median of the others "
            "(in a pipeline, of the others of its stage)."
        )
        names = [f"rank {rank}" for rank in range(ranks)]
        parts += ["<h2>Work of the ranks</h2>", f"<p>{text}</p>", *heat_map(names, shown)]
    checks = [(record["step"], record["health"]) for record in times if "health" in record]
    if checks:
        parts += ["<h2>Hardware</h2>", _slow_table(checks), *_check_map(checks)]
    return parts


def _slow_table(checks: Sequence[tuple[int, dict[str, Any]]]) -> str:
    """Return what was slow, or computed wrongly, and from when to when."""
    findings: dict[tuple[str, int], tuple[int, int, dict[str, Any]]] = {}
    for number, (step, check) in enumerate(checks, 1):
        for entry in check["slow"]:
            findings[entry["name"], entry["since"]] = number, step, entry
    if not findings:
        return f"<p>Nothing was slow in {len(checks)} check{'s' * (len(checks) > 1)}.</p>"
    rows: list[Sequence[str]] = [("what", "from step", "to step", "last", "usual")]
    for (name, since), (number, step, entry) in findings.items():
        until = "now" if number == len(checks) else str(step)
        speeds = ("wrong", "")
        if entry["unit"]:
            speeds = scaled_text(entry["value"], entry["unit"]), scaled_text(entry["usual"], entry["unit"])
        rows.append((name, str(since), until, *speeds))
    return _table(rows)


def _check_map(checks: Sequence[tuple[int, dict[str, Any]]]) -> list[str]:
    things: dict[str, dict[int, tuple[float, str]]] = {}
    for step, check in checks:
        for key, unit in (("products", "FLOP/s"), ("memory", "B/s")):
            for rank, value in enumerate(check[key]):
                things.setdefault(f"rank {rank}, {key}", {})[step] = value, unit
        for before, after, value in check["links"]:
            things.setdefault(f"link {before} to {after}", {})[step] = value, "B/s"
    usual = {name: median(value for value, _ in seen.values()) for name, seen in things.items()}
    steps = sorted({step for step, _ in checks})
    columns = [
        (step, [
            (usual[name] / seen[step][0], scaled_text(*seen[step])) if step in seen and seen[step][0] else (0.0, "none")
            for name, seen in things.items()
        ]) for step in steps
    ]  # fmt: skip
    return ["<p>Speeds in each check; dark ones are below the median of their row.</p>", *heat_map([*things], columns)]


def heat_map(names: Sequence[str], columns: Sequence[tuple[int, list[tuple[float, str]]]]) -> list[str]:
    """Return a picture with a row for each name and a column for each step: a ratio, from 1 (light) to 2, and words."""
    step = -(-len(columns) // MOST_COLUMNS)
    # Of each stretch the worst value of each row.
    drawn = []
    for begin in range(0, len(columns), step):
        part = columns[begin : begin + step]
        drawn.append((part[0][0], [max(cells) for cells in zip(*(cells for _, cells in part), strict=True)]))
    rows = sorted(range(len(names)), key=lambda row: -max(cells[row][0] for _, cells in drawn))[:MOST_ROWS]
    note = [f"<p>Only the {MOST_ROWS} rows of {len(names)} with the darkest cells.</p>"] * (len(rows) < len(names))
    high, top, width = 18.0, 6.0, WIDTH - LONG_NAMES - 20
    wide, body = width / len(drawn), []
    for place, row in enumerate(sorted(rows)):
        name = names[row]
        body.append(label(LONG_NAMES - 8, top + high * place + 13, name, "end"))
        for column, (at, cells) in enumerate(drawn):
            ratio, words = cells[row]
            darkness = min(1.0, max(0.0, ratio - 1.0))
            colour = f"hsl(22 {90 * darkness:.0f}% {92 - 52 * darkness:.0f}%)"
            title = f"{name}, step {at}: {words}, {ratio:.2f} of the usual time"
            body.append(box(LONG_NAMES + wide * column, top + high * place, wide, high - 2, colour, title))
    bottom = top + high * len(rows)
    body.append(label(LONG_NAMES, bottom + 14, f"step {drawn[0][0]}"))
    body.append(label(LONG_NAMES + width, bottom + 14, f"step {drawn[-1][0]}", "end"))
    return [*note, svg(bottom + 22, body)]
