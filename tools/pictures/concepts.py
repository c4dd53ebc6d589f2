"""Draw the pictures of the manual: ``python tools/pictures/concepts.py``."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from pictures import guides, mixtures  # noqa: E402
from pictures.canvas import BLUE, GREEN, GREY, ORANGE, VIOLET, WIDTH, Canvas  # noqa: E402
from zeromesh.base.placement import ROWS, Placement  # noqa: E402

RANKS = 4
STATES = (("parameter", BLUE), ("gradient", ORANGE), ("optimizer", GREEN))


def _legend(canvas: Canvas, y: float) -> None:
    for number, (state, colour) in enumerate(STATES):
        x = 70 + number * 100
        canvas.box(x, y, 10, 10, colour)
        canvas.text(x + 15, y + 9, state + ("s" if state != "optimizer" else " state"))


def placement() -> str:
    """Return what each of four ranks keeps at each ZeRO stage, from the engine's table."""
    canvas = Canvas(34 + 62 * len(ROWS) + 8)
    _legend(canvas, 8)
    cell = 74
    for rank in range(RANKS):
        canvas.text(70 + rank * cell + 33, 38, f"rank {rank}", 10, "middle")
    for number, (stage, row) in enumerate(ROWS.items()):
        top = 44 + 62 * number
        canvas.text(8, top + 24, f"ZeRO-{stage}", 12)
        for rank in range(RANKS):
            for line, (state, colour) in enumerate(STATES):
                x, y, wide = 70 + rank * cell, top + 16 * line, 66
                canvas.box(x, y, wide, 13, GREY)
                if getattr(row, state) is Placement.SHARDED:
                    canvas.box(x + rank * wide / RANKS, y, wide / RANKS, 13, colour)
                else:
                    canvas.box(x, y, wide, 13, colour)
    return canvas.svg("Parts of the parameters, gradients and optimizer state that each of four ranks keeps")


HOMES = (
    ("ZeRO-2", ("device", "device", "device")),
    ("ZeRO-2, optimizer on host", ("device", "host", "host")),
    ("ZeRO-3", ("device", "device", "device")),
    ("ZeRO-3, all on host", ("host", "host", "host")),
    ("ZeRO-3, all on NVMe", ("NVMe", "host", "NVMe")),
)
"""Layouts with offload, and where parameters, gradient sums and optimizer state rest: docs/offload.md."""


def tiers() -> str:
    """Return the memory in which each state rests, by layout."""
    canvas = Canvas(46 + 46 * len(HOMES))
    _legend(canvas, 8)
    for number, name in enumerate(("device", "host", "NVMe")):
        canvas.text(140 + number * 80 + 37, 38, name, 11, "middle")
    for number, (layout, places) in enumerate(HOMES):
        top = 44 + 46 * number
        for line, part in enumerate(layout.split(", ")):
            canvas.text(8, top + 18 + 13 * line, part)
        for column, tier in enumerate(("device", "host", "NVMe")):
            x = 140 + column * 80
            canvas.box(x, top, 74, 40, GREY)
            here = [colour for (_, colour), place in zip(STATES, places, strict=True) if place == tier]
            for place, colour in enumerate(here):
                canvas.box(x + 3, top + 3 + 12 * place, 68, 10, colour)
    return canvas.svg("The memory in which parameters, gradient sums and optimizer state rest")


def slots() -> str:
    """Return which unit each of two slots holds over a forward."""
    canvas = Canvas(150)
    wide, left = 60, 68
    for number, name in enumerate(("network", "slot 1", "slot 2", "compute")):
        canvas.text(8, 27 + 32 * number, name)
    for unit in range(4):
        x = left + wide * unit
        canvas.box(x, 12, wide - 2, 24, VIOLET, f"gather {unit}", 10)
        canvas.box(x + wide, 108, wide - 2, 24, BLUE, f"unit {unit}", 10)
        canvas.box(x, 44 + 32 * (unit % 2), 2 * wide - 2, 24, GREEN, f"parameters of {unit}", 10)
    canvas.text(left, 146, "time →", 10)
    return canvas.svg("Two slots: one unit computes while the next is gathered")


def tensor() -> str:
    """Return an MLP whose layers are split over two ranks."""
    canvas = Canvas(236)
    canvas.box(110, 8, 160, 24, GREY, "input, on both ranks")
    for rank, x in enumerate((20, 205)):
        canvas.arrow(WIDTH / 2, 32, x + 77, 52)
        canvas.box(x, 52, 155, 34, BLUE, f"rank {rank}: half of the columns of layer 1")
        canvas.arrow(x + 77, 86, x + 77, 100)
        canvas.box(x, 100, 155, 22, GREY, "activation, half as wide")
        canvas.arrow(x + 77, 122, x + 77, 136)
        canvas.box(x, 136, 155, 34, GREEN, f"rank {rank}: half of the rows of layer 2")
        canvas.arrow(x + 77, 170, WIDTH / 2, 198)
    canvas.box(70, 198, 240, 26, ORANGE, "all-reduce: the output, on both ranks")
    return canvas.svg("A pair of layers split over two ranks needs one all-reduce")


def offload() -> str:
    """Return a step with optimizer state on the host."""
    canvas = Canvas(152)
    left, wide = 78, 34
    for number, name in enumerate(("device", "to host", "host", "to device")):
        canvas.text(8, 27 + 32 * number, name)
    for unit in range(3):
        canvas.box(left + wide * unit, 12, wide - 2, 24, ORANGE, f"B{2 - unit}")
        canvas.box(left + wide * (unit + 1), 44, wide - 2, 24, VIOLET, f"G{2 - unit}")
        canvas.box(left + wide * (unit + 4), 76, wide - 2, 24, GREEN, f"U{unit}")
        canvas.box(left + wide * (unit + 5), 108, wide - 2, 24, BLUE, f"P{unit}")
    canvas.text(8, 147, "B backward, G gradient, U update, P new parameters; of units 0, 1, 2", 10)
    return canvas.svg("The host updates one unit while the parameters of the one before are copied back")


DEVICES = "How many devices?"
BRANCHES = (
    (
        "one",
        "Does the model fit?",
        (("yes", "plain training"), ("no", "offload to host"), ("no to both", "offload to NVMe")),
    ),
    (
        "one node",
        "Do the states fit?",
        (
            ("yes", "data parallel, ZeRO-0 or 1"),
            ("no", "ZeRO-3, or with tensor"),
            ("nor one layer", "tensor"),
        ),
    ),
    (
        "several nodes",
        "How fast are the links?",
        (("slow", "tensor inside, pipeline across"), ("fast", "ZeRO-3 over all, some tensor")),
    ),
)


def choosing() -> str:
    """Return the decision tree, from top to bottom so that it fits a phone."""
    canvas = Canvas(50 + sum(40 + 36 * len(leaves) for _, _, leaves in BRANCHES))
    canvas.box(8, 8, 150, 26, BLUE, DEVICES)
    y = 46.0
    for devices, question, leaves in BRANCHES:
        canvas.text(28, y + 17, devices)
        canvas.arrow(104, y + 13, 118, y + 13)
        canvas.box(120, y, 200, 26, BLUE, question)
        for number, (answer, layout) in enumerate(leaves):
            top = y + 34 + 36 * number
            canvas.text(72, top + 17, answer)
            canvas.arrow(156, top + 13, 168, top + 13)
            canvas.box(170, top, 200, 28, GREEN, layout)
        y += 40 + 36 * len(leaves)
    return canvas.svg("A decision tree: one device, one node, several nodes")


DRAWINGS = (
    *(placement, tiers, slots, tensor, offload, choosing),
    *(guides.speed, guides.launching, guides.packing, guides.finetuning),
    *(mixtures.experts, mixtures.expert_groups),
)
PICTURES = {function.__name__: function for function in DRAWINGS}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (ROOT / "docs" / "pictures" / f"{name}.svg").write_text(draw(), encoding="utf-8")
