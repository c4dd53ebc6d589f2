"""The picture of a benchmark: seconds per step of every variant, a panel per case."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

COLOURS = {"ZeroMesh": "#0072B2", "DeepSpeed": "#E69F00", "torch": "#999999"}
"""From the palette of Okabe and Ito, which tell apart whatever colours one sees."""

COLUMNS = 3


def family(variant: str) -> str:
    """Whose work a variant is."""
    return next((name for name in COLOURS if variant.startswith(name)), "torch")


def draw(variants: dict[str, list[str]], found: dict[str, dict[str, tuple[float, float, float]]], path: Path) -> bool:
    """Draw it, with whiskers from the fastest to the slowest round and a line at the floor.

    Args:
        variants: by case the names of all, also of those that failed.
        found: seconds per step by case and variant: median, least, most.
        path: of the PNG file.

    Returns:
        False, after a word on it, where matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch
    except ImportError:
        print("no picture: matplotlib is not installed; pip install matplotlib", file=sys.stderr)
        return False
    columns = min(COLUMNS, len(found))
    rows = math.ceil(len(found) / columns)
    figure = Figure(figsize=(2.6 + 3.3 * columns, 0.8 + 3.3 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False)
    # The same places in all panels, as only the first of a row has names.
    names = list(dict.fromkeys(name for case in found for name in variants[case] if name != "floor"))
    for number, panel in enumerate(panels.flat):
        if number >= len(found):
            panel.set_axis_off()
            continue
        case = list(found)[number]
        _panel(panel, case, names, found[case], failed=set(variants[case]) - set(found[case]))
        if number % columns:
            panel.set_yticklabels([])
    present = {family(name) for case in found.values() for name in case if name != "floor"}
    keys: list[Any] = [Patch(color=colour, label=name) for name, colour in COLOURS.items() if name in present]
    keys.append(Line2D([], [], color="black", linestyle="--", label="floor: forward and backward"))
    figure.legend(handles=keys, loc="outside lower center", ncols=len(keys) if columns > 1 else 2, frameon=False)
    figure.savefig(path, dpi=110)
    return True


def _panel(
    panel: Any, case: str, names: list[str], values: dict[str, tuple[float, float, float]], failed: set[str]
) -> None:  # fmt: skip
    """One case: a bar per variant, from the top down; nothing for those that it does not have."""
    longest = max((most for _, _, most in values.values()), default=1.0)
    for place, name in enumerate(names):
        if name in failed:
            panel.text(0.01 * longest, place, "failed", va="center", fontsize=8)
        if name not in values:
            continue
        middle, least, most = values[name]
        whiskers = [[middle - least], [most - middle]]
        panel.barh(place, middle, xerr=whiskers, color=COLOURS[family(name)], ecolor="black", capsize=2)
        panel.text(most + 0.02 * longest, place, f"{middle:#.3g}", va="center", fontsize=8)
    if "floor" in values:
        panel.axvline(values["floor"][0], color="black", linewidth=1, linestyle="--")
    panel.set_yticks(range(len(names)), names, fontsize=9)
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.set_xlim(0, 1.17 * longest)
    panel.set_xlabel("seconds per step")
    panel.set_title(case, fontsize=11)
