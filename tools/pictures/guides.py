"""Pictures of the home page and of the guides on launching, data and fine-tuning; ``concepts.py`` writes them."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

from pictures.canvas import BLUE, GREEN, GREY, ORANGE, VIOLET, WIDTH, Canvas

BENCHMARK = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "2026-11-27.json"

COMPARED = {
    "DDP": ("DDP", GREY),
    "FSDP2, reshard (ZeRO-3)": ("FSDP2", GREY),
    "DeepSpeed 3": ("DeepSpeed ZeRO-3", GREY),
    "ZeroMesh 3": ("ZeroMesh ZeRO-3", GREEN),
}
"""Rows of the benchmark, their names in the picture, and their colours."""

CASES = {
    "communication-bf16": "communication dominates: 128 tokens per step",
    "compute-bf16": "computation dominates: 1,024 tokens per step",
}


def speed() -> str:
    """Return seconds per step of ZeroMesh and its peers, from the committed benchmark."""
    canvas = Canvas(2 * (26 + 24 * len(COMPARED)) + 22)
    cases, left, y = json.loads(BENCHMARK.read_text(encoding="utf-8"))["cases"], 132, 8.0
    for case, title in CASES.items():
        rounds = {name: cases[case]["rows"][name]["rounds"] for name in COMPARED}
        seconds = {name: median(median(each["times"]) for each in rounds[name]) for name in COMPARED}
        canvas.text(8, y + 12, title, 12)
        y += 22
        for name, (label, colour) in COMPARED.items():
            wide = seconds[name] / max(seconds.values()) * (WIDTH - left - 52)
            canvas.text(8, y + 14, label)
            canvas.box(left, y, wide, 19, colour)
            canvas.text(left + wide + 5, y + 14, f"{seconds[name]:.3f} s")
            y += 24
        y += 4
    canvas.text(8, y + 10, "27 M parameters, bf16, two CPU ranks; shorter is faster", 10)
    return canvas.svg("Seconds per step of ZeroMesh beside DDP, FSDP2 and DeepSpeed")


def launching() -> str:
    """Return the processes and ports of a run on two nodes."""
    canvas = Canvas(268)
    for node, x in enumerate((8, 198)):
        canvas.box(x, 8, 174, 198, "#fff")
        canvas.text(x + 87, 24, f"node{node + 1}", 12, "middle")
        canvas.box(x + 10, 32, 154, 34, BLUE, "zeromesh launch")
        for rank in range(2):
            canvas.arrow(x + 48 + 78 * rank, 66, x + 48 + 78 * rank, 92)
            canvas.box(x + 14 + 78 * rank, 92, 68, 30, GREEN, f"rank {2 * node + rank}")
    canvas.box(18, 142, 154, 52, ORANGE, "master: node1:29500, all nodes reach this port")
    canvas.arrow(208, 168, 174, 168)
    canvas.text(212, 158, "meets there, and", 10)
    canvas.text(212, 171, "shows the secret", 10)
    canvas.arrow(168, 104, 212, 104)
    canvas.arrow(212, 111, 168, 111)
    canvas.box(8, 214, 364, 24, VIOLET, "gradients and parameters: nccl or gloo, ports of their own")
    canvas.text(8, 254, "Open in a firewall: the master's port, and all ports between the nodes.", 10)
    return canvas.svg("Two nodes: a launcher and two ranks on each, which meet at the master's port")


DOCUMENTS = ((0.62, BLUE), (0.3, GREEN), (0.45, ORANGE), (0.5, VIOLET))
"""Lengths of records, as shares of a sample."""


def packing() -> str:
    """Return records that are packed and padded, and a blend of two sources."""
    canvas = Canvas(250)
    sample, left = 140, 76
    canvas.text(8, 20, "records", 12)
    x = float(left)
    for number, (length, colour) in enumerate(DOCUMENTS):
        canvas.box(x, 8, length * sample - 2, 20, colour, str(number + 1))
        x += length * sample
    for y, name, rows in (
        (42, "pack", ((0, 1), (2, 3))),
        (94, "pad", ((0,), (1,), (2,), (3,))),
    ):
        canvas.text(8, y + 14, name, 12)
        for place, members in enumerate(rows):
            column, row = place % 2, place // 2
            x, top = left + column * (sample + 8), y + 24 * row
            canvas.box(x, top, sample, 20, GREY)
            if name == "pad":
                canvas.text(x + sample - 4, top + 14, "padding", 10, "end")
            for number in members:
                length, colour = DOCUMENTS[number]
                canvas.box(x, top, length * sample - 1, 20, colour, str(number + 1))
                x += length * sample
    canvas.text(left, 76, "two samples, nearly full; a record sees only itself", 10)
    canvas.text(left, 152, "four samples, of which half is padding", 10)
    canvas.text(8, 182, "blend", 12)
    canvas.box(left, 168, 78, 20, BLUE, "web, 0.75", 10)
    canvas.box(left, 194, 78, 20, ORANGE, "code, 0.25", 10)
    for y in (178, 204):
        canvas.arrow(left + 78, y, left + 100, 191)
    for place in range(8):
        canvas.box(left + 102 + 23 * place, 181, 21, 20, ORANGE if place % 4 == 3 else BLUE)
    canvas.text(left, 236, "samples in the order of training; a short source is repeated", 10)
    return canvas.svg("Records that are packed into samples or padded, and a blend of two sources")


def finetuning() -> str:
    """Return the way from a model and a file to an answer."""
    canvas = Canvas(272)
    canvas.box(8, 8, 112, 46, BLUE, "a model: a folder, or a name on the Hub")
    canvas.box(134, 8, 112, 46, BLUE, "chats.jsonl: one record a line")
    canvas.box(260, 8, 112, 46, BLUE, "chat.json: the settings")
    for x in (64, 190, 316):
        canvas.arrow(x, 54, 190 + (x - 190) * 0.4, 78)
    canvas.box(70, 78, 240, 28, GREEN, "zeromesh train chat.json", 12)
    canvas.arrow(190, 106, 190, 126)
    canvas.box(40, 126, 300, 40, ORANGE, "runs/chat: model or adapters, checkpoints, report.html, metrics")
    for x, command, result in (
        (8, "zeromesh sample", "an answer"),
        (134, "zeromesh export", "a folder that from_pretrained opens"),
        (260, "zeromesh report", "the run's page"),
    ):
        canvas.arrow(190 + (x + 56 - 190) * 0.6, 166, x + 56, 184)
        canvas.box(x, 184, 112, 22, GREEN, command)
        canvas.arrow(x + 56, 206, x + 56, 218)
        canvas.box(x, 218, 112, 46, GREY, result)
    return canvas.svg("From a model and a file of chats to a run, and from the run to answers and a model")
