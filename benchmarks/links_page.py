"""From the figures of ``links.py`` to a page and a picture: ``python benchmarks/links_page.py FIGURES.json``."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from statistics import median
from typing import Any

from page import LIST, lines_of, spread
from picture import COLOURS, family

REFERENCE = "ZeroMesh 3, flat"
"""What the others are said to be faster than."""

STYLES = {"flat": "-", "hybrid": "--", "hierarchical": "-."}
MARKERS = {"0": "o", "1": "s", "2": "^", "3": "D", "DDP": "o", "FSDP2": "D", "HSDP": "v"}

Result = dict[str, Any]
"""What ``links.main`` writes."""


def rates_of(result: Result) -> list[str]:
    """The rates that were measured, slowest first."""
    rates = list(next(iter(result["rows"].values()))["rates"])
    return sorted(rates, key=in_megabits)


def in_megabits(rate: str) -> float:
    """Of one of the rates that ``links.py`` takes."""
    if rate == "unlimited":
        return math.inf
    return float(rate[:-4]) * {"k": 1e-3, "m": 1.0, "g": 1e3}[rate[-4]]


def said(rate: str) -> str:
    """A rate, for people."""
    return "no limit" if rate == "unlimited" else f"{in_megabits(rate):g} Mbit/s"


def seconds(result: Result, name: str, rate: str) -> tuple[float, float, float] | None:
    """Median, least and most of the rounds, if there are any."""
    rounds = result["rows"][name]["rates"][rate]
    return spread([figures["seconds"] for figures in rounds]) if rounds else None


def differing(result: Result, name: str) -> bool:
    """Whether a row's losses, of any rate and round, are not those of the first row that has any."""
    every = [row for row in result["rows"].values() if any(row["rates"].values())]
    if not every:
        return False
    expected = max((f["losses"] for rounds in every[0]["rates"].values() for f in rounds), key=len)
    return any(
        not abs(loss - other) <= result["rows"][name]["tolerance"] * abs(other)
        for rounds in result["rows"][name]["rates"].values()
        for figures in rounds
        for loss, other in zip(figures["losses"], expected, strict=False)
    )


def time_table(result: Result) -> str:
    """Seconds per step, a column per rate."""
    rates = rates_of(result)
    table = [["s/step (least - most)", *map(said, rates)]]
    for name in result["rows"]:
        cells = [seconds(result, name, rate) for rate in rates]
        table.append([name, *(f"{c[0]:.3f} ({c[1]:.3f} - {c[2]:.3f})" if c else "-" for c in cells)])
    return lines_of(table)


def ratio_table(result: Result) -> str:
    """How many times as fast as the reference; empty if that was not measured."""
    rates = rates_of(result)
    if REFERENCE not in result["rows"] or not any(result["rows"][REFERENCE]["rates"].values()):
        return ""
    table = [[f"times as fast as {REFERENCE}", *map(said, rates)]]
    for name in result["rows"]:
        pairs = [(seconds(result, REFERENCE, rate), seconds(result, name, rate)) for rate in rates]
        table.append([name, *(f"{flat[0] / own[0]:.2f}" if flat and own else "-" for flat, own in pairs)])
    return lines_of(table)


def bytes_table(result: Result) -> str:
    """Bytes over the link, per step and direction."""
    table = [["over the link, per step", "MB one way", "MB the other way", "elements per parameter", "by the formulas"]]
    for name, row in result["rows"].items():
        rounds = [figures for found in row["rates"].values() for figures in found]
        if not rounds:
            continue
        ways = [median(figures["sent"][host] for figures in rounds) for host in (0, 1)]
        elements = sum(ways) / 2 / 4 / result["parameters"]
        link = "-" if row["link"] is None else f"{row['link']:g}"
        table.append([name, *(f"{way / 1e6:.2f}" for way in ways), f"{elements:.2f}", link])
    return lines_of(table)


def page(result: Result, picture: bool) -> str:
    """The whole page, as Markdown."""
    stand_in = """
**Network namespaces were not permitted.** Instead, the test helper `throttle.py` delayed ZeroMesh's messages.
"""
    # More than half a core is taken by others.
    busy = f"""
**The machine was busy**: before the first round, {result["load"]:.1f} processes on average were running on its
{result["cores"]} cores. This makes steps longer, most of all over fast links.
"""
    parts = [
        f"""# Step time over slow links, {result["date"]}

Commit {result["commit"]}; {result["machine"]}; gloo; torch {result["torch"]}.
Made by `make bench-links`; the figures are in [{result["name"]}.json]({result["name"]}.json).

Two emulated hosts with two ranks each run on one machine: network namespaces, with a limited rate in each direction.
Messages between ranks of the same host do not use the link. All rows train the same decoder of
{result["parameters"] / 1e6:.2f} M parameters in fp32 ({result["layers"]} blocks of width {result["hidden"]}) with
AdamW, from the same weights and on the same batch. They take turns for {result["rounds"]} round(s). The tables have the
median of the rounds, and the least and the most. The four ranks share the cores of the machine; without a limit,
computation and waiting for other ranks dominate.
{"" if result["kind"] == "namespaces" else stand_in}{busy if result["load"] > 0.5 else ""}
- *flat*: the states are sharded over all four ranks, and each rank sends to each other.
- *hierarchical*: the states are sharded over all four ranks, and collectives have a step inside the hosts and a step
  between them.
- *hybrid*: the states are sharded over the two ranks of a host, and the hosts are replicas, by
  `"mesh": {{"replicate": 2}}`. torch's HSDP does the same.
- **MB** are the bytes of payload that a host sent over its interface, as counted by the kernel. ZeroMesh 3 sends less
  than the formula, because the last 2 of {result["layers"]} blocks and the root are not gathered again for the
  backward."""
    ]
    if picture:
        parts.append(f"![Curves of seconds per step over the link's rate]({result['name']}.png)")
    parts += [time_table(result), ratio_table(result), bytes_table(result)]
    for name, row in result["rows"].items():
        if differing(result, name):
            parts.append(f"**The losses of {name} differ from those of the others.**")
        if row["error"] is not None:
            parts.append(f"{name} failed:\n\n```text\n{row['error'].replace('```', '')}\n```")
    return "\n\n".join(part for part in parts if part) + "\n"


def draw(result: Result, path: Path) -> bool:
    """Both axes logarithmic; no limit stands at the right. False, after a word on it, without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: matplotlib is not installed; pip install matplotlib", file=sys.stderr)
        return False
    rates = rates_of(result)
    limited = [in_megabits(rate) for rate in rates if rate != "unlimited"]
    beyond = 4 * max(limited, default=1.0)
    figure = Figure(figsize=(8.5, 5), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    for name in result["rows"]:
        measured = [(min(in_megabits(rate), beyond), found) for rate in rates if (found := seconds(result, name, rate))]
        if not measured:
            continue
        stage, _, way = name.removeprefix("ZeroMesh ").partition(", ")
        middle = [found[0] for _, found in measured]
        whiskers = [[f[0] - f[1] for _, f in measured], [f[2] - f[0] for _, f in measured]]
        panel.errorbar(
            [place for place, _ in measured], middle, yerr=whiskers, label=name, color=COLOURS[family(name)],
            linestyle=STYLES.get(way, ":"), marker=MARKERS.get(stage), markersize=5, linewidth=1.3, capsize=2,
        )  # fmt: skip
    panel.set_xscale("log")
    panel.set_yscale("log")
    places = [min(in_megabits(rate), beyond) for rate in rates]
    panel.set_xticks(places, ["no limit" if rate == "unlimited" else f"{in_megabits(rate):g}" for rate in rates])
    panel.set_xticks([], minor=True)
    panel.set_xlabel("rate of the link between the hosts, Mbit/s in each direction")
    panel.set_ylabel("seconds per step")
    panel.grid(alpha=0.3, which="both")
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    figure.savefig(path, dpi=110)
    return True


def write(path: Path) -> Path:
    """Write the page and the picture beside the JSON file, link the page where there is a list, and say where it is."""
    result = {**json.loads(path.read_text()), "name": path.stem}
    target, readme = path.with_suffix(".md"), path.with_name("README.md")
    target.write_text(page(result, draw(result, path.with_suffix(".png"))))
    if readme.exists() and f"({target.name})" not in (text := readme.read_text()):
        entry = f"- [{target.name}]({target.name}): two hosts over slow links; {result['machine']}.\n"
        readme.write_text(text.replace(LIST, LIST + entry, 1))
    return target


if __name__ == "__main__":
    print(write(Path(sys.argv[1])))
