"""Tables and pictures of what ``step_time.py`` measured.

    python benchmarks/show.py compute.json communication.json --picture step_time.png

Prints a Markdown table per file; the picture shows the seconds per step of all of them side by side.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Run = dict[str, Any]
"""What a file of ``step_time.py`` holds."""


def machine() -> str:
    """The device of this machine, or its processor and how many cores there are."""
    if torch.accelerator.is_available() and torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    model = platform.processor() or platform.machine()
    details = Path("/proc/cpuinfo")
    if details.is_file():
        names = [line.partition(":")[2].strip() for line in details.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return f"{model}, {os.cpu_count()} cores"


def title(run: Run) -> str:
    """What was run, in one line."""
    arguments, case = run["arguments"], run["case"]
    return (
        f"**{arguments['case']}**: {case['batch']} x {case['sequence']} tokens per rank and step, "
        f"{run['parameters'] / 1e6:.1f} M parameters, {arguments['dtype']}, {arguments['ranks']} ranks, "
        f"{arguments['rounds']} rounds of {arguments['steps']} steps; "
        f"{run['machine']}, torch {run['torch']}, {run['date']}"
    )


def spread(runs: list[Run], value: Callable[[Run], float]) -> tuple[float, float, float]:
    """Median, least and largest over the rounds."""
    values = [value(run) for run in runs]
    return statistics.median(values), min(values), max(values)


def seconds(run: Run) -> float:
    """Of one round: the median step."""
    return float(statistics.median(run["times"]))


def table(run: Run) -> str:
    """Markdown: a line per variant. CPU seconds and megabytes are those of one rank."""
    memory = run["arguments"]["memory"]
    results: dict[str, list[Run]] = run["results"]
    if memory:
        head = ["variant", "peak MB of rank 0 (min - max)"]
    else:
        head = ["variant", "s/step (min - max)", "ratio to floor", "CPU s/step", "MB sent per step", "last loss"]
    lines = [head, ["---"] * len(head)]
    floor = spread(results["floor"], seconds)[0] if "floor" in results else float("nan")
    for name, runs in results.items():
        if memory:
            middle, least, most = (value / 1e6 for value in spread(runs, lambda run: run["peak"]))
            lines.append([name, f"{middle:.0f} ({least:.0f} - {most:.0f})"])
            continue
        middle, least, most = spread(runs, seconds)
        lines.append([
            name, f"{middle:.3f} ({least:.3f} - {most:.3f})", f"{middle / floor:.2f}",
            f"{spread(runs, lambda run: run['cpu'])[0]:.3f}", f"{spread(runs, lambda run: run['wire'])[0] / 1e6:.1f}",
            f"{runs[-1]['loss']:.4f}",
        ])  # fmt: skip
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def picture(runs: list[Run], path: Path) -> None:
    """Bars with the seconds per step, one panel per file; whiskers from the least to the largest round."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(runs), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(runs), squeeze=False)[0]
    for panel, run in zip(panels, runs, strict=True):
        found = {name: spread(rounds, seconds) for name, rounds in run["results"].items()}
        names, values = list(found), list(found.values())
        middle = [value[0] for value in values]
        whiskers = [[value[0] - value[1] for value in values], [value[2] - value[0] for value in values]]
        colours = ["tab:blue" if name.startswith("ZeroMesh") else "silver" for name in names]
        panel.barh(names, middle, xerr=whiskers, color=colours, ecolor="dimgray", capsize=2)
        if "floor" in found:
            panel.axvline(found["floor"][0], color="dimgray", linewidth=0.8, linestyle=":")
        panel.invert_yaxis()
        panel.set_xlabel("seconds per step")
        panel.set_title(f"{run['arguments']['case']}, {run['arguments']['dtype']}", fontsize=10)
    for panel in panels[1:]:
        panel.set_yticklabels([])
    figure.savefig(path, dpi=110)


def main() -> None:
    """Read the command line; print the tables and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    runs = [json.loads(path.read_text()) for path in arguments.files]
    for run in runs:
        print(title(run), table(run), sep="\n\n", end="\n\n")
    if arguments.picture:
        picture(runs, arguments.picture)


if __name__ == "__main__":
    main()
