"""Metrics as JSON lines, one record per line, written at once, never twice for the same step; and a picture of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Curve = Sequence[tuple[int, float]]
"""Steps and values."""


class MetricsLog:
    """Append records to a file.

    Args:
        path: the file. What it holds beyond ``last_step`` is dropped: the steps of a run that went on after its last
            checkpoint, which the resumed run takes again, and a line that was cut off.
        last_step: step after which the run continues; 0 for a new run.
    """

    def __init__(self, path: Path, last_step: int = 0) -> None:
        kept = [record for record in read_metrics(path) if record["step"] <= last_step]
        part = path.with_name(path.name + ".part")
        part.write_text("".join(json.dumps(record) + "\n" for record in kept))
        part.replace(path)
        self._written = {(record["kind"], record["step"]) for record in kept}
        self._file = path.open("a")

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append the record of a kind, such as "train" or "validation", for a step, unless it is there."""
        if (kind, step) in self._written:
            return
        self._written.add((kind, step))
        self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a file, in order; none if it does not exist. A line that was cut off is left out."""
    if not path.is_file():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def loss_picture(path: Path, training: Curve, validation: Curve) -> bool:
    """Draw the loss in nats per token over the steps. Returns whether matplotlib was there to do it."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if training:
        axes.plot(*zip(*training, strict=True), linewidth=1, label="training")
    if validation:
        axes.plot(*zip(*validation, strict=True), marker="o", markersize=3, label="validation")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per token")
    axes.grid(alpha=0.3)
    if training or validation:
        axes.legend()
    figure.savefig(path, dpi=120)
    return True
