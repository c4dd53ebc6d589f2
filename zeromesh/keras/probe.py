"""Probe of a user's own loss: ranks can share it only if it is a mean over the rows of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import torch

from zeromesh.comm.agreement import agree_run
from zeromesh.comm.collectives import Group
from zeromesh.keras.run import kept
from zeromesh.model.keras_layers import global_seed, seeds_of


def has_own_loss(model: Any) -> bool:
    """Return whether a model's loss, or a part of it, is none of Keras."""
    chosen = keras.tree.flatten(model._compile_loss._user_loss if model._compile_loss else None)
    given = [getattr(one, "fn", one) for one in chosen if one is not None and not isinstance(one, str)]
    kinds = [one if hasattr(one, "__name__") else type(one) for one in given]
    own = any(not str(getattr(kind, "__module__", "")).startswith("keras.src.") for kind in kinds)
    return own or type(model).compute_loss is not keras.Model.compute_loss


def require_mean(world: Group, model: Any, compute: Callable[..., Any], values: Mapping[str, Any], rows: int) -> None:
    """Raise ValueError on all ranks if the loss of some rows is not the mean of those of their halves. Collective.

    A sum over the batch, or a loss that compares its rows with each other, would be silently another one on ranks that
    have some of the rows. Metrics and generators are as they were afterwards.

    Args:
        world: all ranks.
        model: its metrics and seed generators are given their values back.
        compute: of ``values``, returns a scalar.
        values: arguments of ``compute_loss``, with ``rows`` rows each.
        rows: of this rank; with fewer than two it computes along, as parameters may be gathered for it.
    """
    count, half = max(rows, 1), rows // 2 or 1
    whole = keras.tree.map_structure(lambda one: one.detach() if isinstance(one, torch.Tensor) else one, dict(values))

    def loss(start: int, stop: int) -> float:
        cut = lambda one: one[start:stop] if isinstance(one, torch.Tensor) else one  # noqa: E731
        return float(compute(**keras.tree.map_structure(cut, whole)))

    # As many calls on every rank, as each may gather parameters.
    parts = ((0, count), (0, count), (0, half), (min(half, count - 1), count))

    def look() -> None:
        variables = [*model.metrics_variables, *seeds_of(model), global_seed(make=True)]
        with torch.no_grad(), kept(variables), torch.random.fork_rng():
            first, again, *halves = (loss(*part) for part in parts)
            if rows < 2 or first != again:
                return  # a loss that draws random numbers cannot be compared
            mean = (half * halves[0] + (rows - half) * halves[1]) / rows
        dtypes = [one.dtype for one in keras.tree.flatten(whole["y_pred"]) if one.is_floating_point()]
        near = max((torch.finfo(dtype).eps for dtype in dtypes), default=1e-7) ** 0.5
        if abs(first - mean) > near * max(1e-6, *map(abs, halves)):
            raise ValueError(
                f"the loss of {rows} rows is {first:.6g}, and the mean of its values for their halves {mean:.6g}: it "
                "is no mean over rows, and ranks that have some rows each would train another one; return one value "
                "for each row, of which Keras takes the mean, or write the loop yourself with zeromesh.initialize, and "
                "join the rows of all ranks by zeromesh.gather_with_gradient"
            )

    agree_run(world, "compute its loss for parts of a batch", look)
