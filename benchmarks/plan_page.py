"""From the figures of ``plan_layouts.py`` to a page and a picture of the planner's error on this machine.

    python benchmarks/plan_page.py docs/benchmarks/DATE-plan.json

Memory is compared as predicted. Time is predicted twice: with the machine as ``zeromesh doctor --save`` measured it in
the same run, and with two factors of that, of computation and of links, for each number of ranks. Every second row
decides them; the others are held out.
"""

from __future__ import annotations

import inspect
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from plan_rows import SEQUENCE, Row, inputs_of, make_model, rows
from zeromesh.apps.plan.choose.layout_documents import layout_from
from zeromesh.apps.plan.cost.cost_trace import TracedCost
from zeromesh.apps.plan.cost.passes import TraceOptions
from zeromesh.apps.plan.machine.cluster import Device, LinkSpeed, Machine
from zeromesh.apps.plan.machine.rates import Habits
from zeromesh.apps.plan.predict.rank_memory import memory_of
from zeromesh.apps.plan.predict.time import time_of
from zeromesh.config.settings import Settings

RATES = {"100mbit": 1e8, "1gbit": 1e9, "10gbit": 1e10}
SPEEDS = [0.60 + 0.02 * number for number in range(31)]
LATENCIES = [0.0, *(2e-4 * 1.25**number for number in range(18))]  # seconds, to 9 ms
BUDGETS = 4  # memory limits of a group of layouts
NEAR = 1.03  # a pick is right if it takes at most so many times the best layout's time


@dataclass(frozen=True)
class Compared:
    """One row as predicted and as measured."""

    row: Row
    memory: float  # bytes, predicted
    peak: float  # measured
    seconds: float  # measured
    plain: float  # predicted with the machine as measured
    fitted: float
    held_out: bool


@lru_cache
def source_of(model: str, bf16: bool) -> TracedCost:
    """Return the cost of a model."""
    made, batch = make_model(model), inputs_of(model, 2, torch.Generator())
    if not isinstance(batch, dict):
        batch = dict(zip(inspect.signature(made.forward).parameters, batch, strict=False))
    return TracedCost(made, batch, TraceOptions(torch.bfloat16 if bf16 else None, kernels="cpu"), name=model)


def scaled(machine: Machine, row: Row, speed: float = 1.0, latency: float | None = None) -> Machine:
    """Return the machine with its speeds times a factor and another latency, and the row's hosts and their link."""

    def device_of(device: Device) -> Device:
        names = ("bandwidth", "cache_bandwidth", "attention_bandwidth", "attention_bandwidth_back", "loss_bandwidth")
        slower = {name: getattr(device, name) * speed for name in names}
        flops = {name: value * speed for name, value in device.flops.items()}
        return replace(device, **slower, flops=flops, launch=device.launch / speed)

    ((node, count),) = machine.nodes
    inside = node.inside if latency is None else replace(node.inside, latency=latency)
    node, between = replace(node, device=device_of(node.device), inside=inside), machine.between
    if row.rate:
        node, count = replace(node, devices=1), row.ranks
        # No link is faster than what ranks of one host reach.
        fastest = inside.bandwidth * inside.efficiency
        between = LinkSpeed(min(RATES[row.rate] / 8, fastest), inside.latency, 1.0)
    return replace(machine, nodes=((node, count),), between=between)


def predicted_seconds(row: Row, machine: Machine) -> float:
    """Return the time of a step."""
    layout, _ = layout_from(Settings.load(row.settings("/tmp")), row.ranks)
    habits = Habits(dtype="bf16" if row.bf16 else "fp32")
    return time_of(source_of(row.model, row.bf16), _sequence(row), layout, machine, habits=habits).seconds


def predicted_bytes(row: Row, machine: Machine) -> float:
    """Return the peak of the fullest rank: device and host are the same memory here."""
    layout, _ = layout_from(Settings.load(row.settings("/tmp")), row.ranks)
    found = memory_of(source_of(row.model, row.bf16), _sequence(row), layout, machine)
    return max(
        rank.peak.total
        + sum(size for (state, tier), size in rank.states.items() if tier == "host" and state != "temporary")
        for rank in found
    )


def _sequence(row: Row) -> int:
    return 1 if row.model == "vit" else SEQUENCE


def compared(figures: dict[str, Any]) -> list[Compared]:
    """Return all rows that were measured, with time as fitted on every second of each number of ranks."""
    by_ranks: dict[int, list[Row]] = defaultdict(list)
    for row in rows():
        if row.name in figures["rows"]:
            by_ranks[row.ranks].append(row)
    found = []
    for ranks, own in by_ranks.items():
        machine = Machine.from_dict(figures["machines"][str(ranks)][0])
        measured = {row.name: _seconds(figures, row) for row in own}
        speed, latency = _fit(own[::2], measured, machine)
        print(f"{ranks} ranks: computation at {speed:.2f} of what was measured, {latency * 1e3:.2f} ms a message")
        for number, row in enumerate(own):
            peak = max(one["peak"] for one in figures["rows"][row.name])
            plain = predicted_seconds(row, scaled(machine, row))
            fitted = predicted_seconds(row, scaled(machine, row, speed, latency))
            memory = predicted_bytes(row, scaled(machine, row))
            found.append(Compared(row, memory, peak, measured[row.name], plain, fitted, number % 2 == 1))
    return found


def _seconds(figures: dict[str, Any], row: Row) -> float:
    # Others on the machine only make a round longer.
    return min(statistics.median(one["seconds"]) for one in figures["rows"][row.name])


def _fit(own: Sequence[Row], measured: dict[str, float], machine: Machine) -> tuple[float, float]:
    def error(factors: tuple[float, float]) -> float:
        times = [predicted_seconds(row, scaled(machine, row, *factors)) for row in own]
        return statistics.fmean(abs(time / measured[row.name] - 1) for time, row in zip(times, own, strict=True))

    return min(product(SPEEDS, LATENCIES if own[0].ranks > 1 else [0.0]), key=error)


@dataclass(frozen=True)
class Scenario:
    """Layouts of one model, batch and number of ranks, and memory that each rank may have."""

    group: str
    limit: float
    picked: Compared
    best: Compared

    @property
    def loss(self) -> float:
        """Time of the pick, in parts of the best layout's."""
        return self.picked.seconds / self.best.seconds


def scenarios(found: Sequence[Compared]) -> Iterator[Scenario]:
    """Yield the planner's pick and the measured best of each group and memory limit."""
    groups: dict[str, list[Compared]] = defaultdict(list)
    for one in found:
        settings = Settings.load(one.row.settings("/tmp"))
        sizes = settings.resolve_mesh(one.row.ranks)
        samples = one.row.micro_batch * one.row.accumulation * sizes["data"] * sizes["replicate"]
        where = f" over {one.row.rate}" if one.row.rate else ""
        groups[f"{one.row.model}, {one.row.ranks} ranks{where}, {samples} samples"].append(one)
    for group, members in groups.items():
        if len(members) < 3:
            continue
        peaks = sorted({member.peak for member in members})
        for number in sorted({round(step * (len(peaks) - 1) / (BUDGETS - 1)) for step in range(BUDGETS)}):
            limit = 1.02 * peaks[number]
            fitting = [member for member in members if member.peak <= limit]
            chosen = min((m for m in members if m.memory <= limit), key=lambda m: m.fitted, default=None)
            if chosen is not None:
                yield Scenario(group, limit, chosen, min(fitting, key=lambda member: member.seconds))


def page_of(found: Sequence[Compared], figures: dict[str, Any], picture: str) -> Iterator[str]:
    """Yield the lines of the page."""

    def line(name: str, errors: Sequence[float]) -> str:
        sizes = [abs(error) for error in errors]
        return f"| {name} | {len(sizes)} | {statistics.fmean(sizes):.2%} | {max(sizes):.2%} |"

    picks = list(scenarios(found))
    right = [one for one in picks if one.loss <= NEAR]
    yield f"# Planner, {figures['date']}: predicted and measured"
    yield ""
    rounds = max(map(len, figures["rows"].values()))
    yield (
        f"This page compares predictions of `zeromesh plan` with measurements on one machine: {figures['machine']}, "
        f"commit {figures['commit']}, {figures['date']}. {len(found)} layouts of three models ran, each in its own "
        f"processes, in up to {rounds} rounds. Memory is the largest sum of allocated blocks of at least 64 KiB during "
        "a step, counted at each allocation. Time is the median of the steps of the faster round. Hosts with a link "
        "are network namespaces."
    )
    yield ""
    yield f"![predicted against measured]({picture})"
    yield ""
    yield "| prediction | layouts | mean error | largest error |"
    yield "|---|---|---|---|"
    yield line("memory", [one.memory / one.peak - 1 for one in found])
    yield line(
        "time, with the machine as `zeromesh doctor --save` measured it", [one.plain / one.seconds - 1 for one in found]
    )
    yield line(
        "time, held-out half, with two factors (speed, message time) fitted to the other half",
        [o.fitted / o.seconds - 1 for o in found if o.held_out],
    )
    yield line(
        "time, the half to which the factors are fitted", [o.fitted / o.seconds - 1 for o in found if not o.held_out]
    )
    yield line("for comparison: difference between rounds of one layout", _spreads(figures))
    yield ""
    yield (
        "## Does the planner choose the best layout?\n\nEach scenario is one model, batch, number of ranks and memory "
        f"limit. The planner's choice was within {NEAR - 1:.0%} of the fastest measured layout in {len(right)} of "
        f"{len(picks)} scenarios. Differences smaller than those between rounds say nothing about the planner."
    )
    yield ""
    yield "| scenario | memory limit, MB | chosen | its time, s | best | its time, s | chosen / best |"
    yield "|---|---|---|---|---|---|---|"
    for one in picks:
        yield (
            f"| {one.group} | {one.limit / 1e6:.0f} | {one.picked.row.name} | {one.picked.seconds:.3f} | "
            f"{one.best.row.name} | {one.best.seconds:.3f} | {one.loss - 1:+.1%} |"
        )
    yield ""
    yield "## All layouts\n\nPredictions are given as errors. *With factors* is the time with the two fitted factors."
    yield ""
    yield "| layout | memory, MB | prediction | time, s | prediction | with factors |"
    yield "|---|---|---|---|---|---|"
    for one in found:
        yield (
            f"| {one.row.name} | {one.peak / 1e6:.1f} | {one.memory / one.peak - 1:+.2%} | {one.seconds:.3f} | "
            f"{one.plain / one.seconds - 1:+.1%} | {one.fitted / one.seconds - 1:+.1%}"
            f"{', held out' if one.held_out else ''} |"
        )


def _spreads(figures: dict[str, Any]) -> list[float]:
    medians = [[statistics.median(one["seconds"]) for one in r] for r in figures["rows"].values() if len(r) > 1]
    return [max(values) / min(values) - 1 for values in medians]


def draw(found: Sequence[Compared], path: Path) -> None:
    """Draw predicted over measured memory and time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    colours = {"decoder": "#0072B2", "gpt2": "#E69F00", "vit": "#009E73"}
    for place, (title, unit) in enumerate((("peak memory", "MB"), ("time of a step", "s"))):
        panel = figure.add_subplot(1, 2, place + 1)
        pairs = [((o.peak / 1e6, o.memory / 1e6) if place == 0 else (o.seconds, o.fitted), o.row.model) for o in found]
        most, least = (pick(max(point) for point, _ in pairs) for pick in (max, min))
        panel.plot([least, most], [least, most], color="#999999", linewidth=1)
        for model, colour in colours.items():
            own = [point for point, name in pairs if name == model]
            panel.scatter(*zip(*own, strict=True), s=14, color=colour, label=model)
        panel.set(title=title, xlabel=f"measured, {unit}", ylabel=f"predicted, {unit}", xscale="log", yscale="log")
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter("{x:g}" if place == 0 else "")
        panel.legend(frameon=False)
    FigureCanvasAgg(figure).print_png(str(path))


def main() -> None:
    """Write the page beside the figures."""
    path = Path(sys.argv[1])
    figures = json.loads(path.read_text())
    found = compared(figures)
    draw(found, path.with_suffix(".png"))
    path.with_suffix(".md").write_text("\n".join(page_of(found, figures, path.with_suffix(".png").name)) + "\n")
    print(path.with_suffix(".md"))


if __name__ == "__main__":
    main()
