"""Metrics as JSON lines, one record per line, and a picture of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Curve = Sequence[tuple[int, float]]  # steps and values


class MetricsLog:
    """Append records to a file; the run continues after ``last_step``."""

    def __init__(self, path: Path, last_step: int = 0) -> None:
        self._path = path
        self._open(last_step)

    def _open(self, last_step: int) -> None:
        # What lies beyond are steps that were taken after the last checkpoint, and are taken again.
        kept = [one for one in read_metrics(self._path) if one["step"] <= last_step or one.get("noted")]
        part = self._path.with_name(self._path.name + ".part")
        part.write_text("".join(json.dumps(record) + "\n" for record in kept))
        part.replace(self._path)  # whole, whenever the process is killed
        self._written = {(record["kind"], record["step"]) for record in kept}
        self._file = self._path.open("a")

    def forget(self, last_step: int) -> None:
        """Leave out the records of steps beyond ``last_step``, which are taken again, but not notes."""
        self._file.close()
        self._open(last_step)

    def note(self, kind: str, step: int, **values: Any) -> None:
        """Append the record of an event, which is kept whatever becomes of its step, unless it is there."""
        record = {"kind": kind, "step": step, "noted": True, **values}
        if any({**one, **record} == one for one in self.notes(kind)):
            return
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append the record of a kind, such as "train" or "validation", for a step, unless it is there."""
        if (kind, step) in self._written:
            return
        self._written.add((kind, step))
        self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self._file.flush()  # who looks at a run, or kills it, has all

    def notes(self, kind: str) -> list[dict[str, Any]]:
        """Return the records of events of a kind so far."""
        return [one for one in read_metrics(self._path) if one["kind"] == kind and one.get("noted")]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file, in order; none if it does not exist."""
    if not path.is_file():
        return []
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:  # a line that was cut off
            continue
    return records


def loss_picture(path: Path, training: Curve, validation: Curve) -> bool:
    """Draw the loss in nats per token over the steps; return False if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    # Not through pyplot, which keeps figures and chooses a backend for screens.
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
