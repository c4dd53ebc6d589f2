"""Pictures of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

Curve = Sequence[tuple[int, float]]
"""Steps and values."""


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
