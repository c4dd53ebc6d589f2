"""Norms of gradients whose elements are spread over ranks; each element counts once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from zeromesh.comm.mesh import Mesh
from zeromesh.shard.gradient import Gradient
from zeromesh.shard.sums import counts

NORM_ROW = 1024
"""Elements whose squares are summed in the gradient's own precision; their sums are added up in float64."""

Place = tuple[Gradient, int]
"""A parameter: its gradient's flat buffer, and its index there."""


def squared_norm(gradients: Sequence[Gradient], mesh: Mesh) -> torch.Tensor:
    """Return the sum of squares of all that this rank counts of the gradients; float64, shape (1,)."""
    total = torch.zeros(1, dtype=torch.float64, device=mesh.device)
    if mesh.replicate.rank == 0:
        for gradient in gradients:
            assert gradient.shard is not None
            for start, stop in gradient.counted if counts(gradient, mesh) else ():
                total += _sum_of_squares(gradient.shard[start:stop])
    return total


def norm_of(places: Sequence[Place], order: float, mesh: Mesh) -> float:
    """Return the norm of some parameters' gradients as they are kept. All ranks call it.

    Args:
        places: the parameters that this rank has; their gradients are complete.
        order: 2 for the Euclidean norm, or any other positive number; ``inf`` for the largest absolute value.
        mesh: the ranks.
    """
    own = torch.zeros(1, dtype=torch.float64)
    for values in _counted(places, mesh):
        if order == torch.inf:
            own = torch.maximum(own, values.abs().max().double().cpu())
        elif order == 2:
            own += _sum_of_squares(values).cpu()
        else:
            own += values.double().abs().pow(order).sum().cpu()
    rows = mesh.group("world").exchange(own)
    return float(rows.max() if order == torch.inf else rows.sum() ** (1 / order))


def _counted(places: Iterable[Place], mesh: Mesh) -> Iterator[torch.Tensor]:
    for gradient, index in places if mesh.replicate.rank == 0 else ():
        part = gradient.part(index)
        assert gradient.shard is not None
        for low, high in gradient.counted if counts(gradient, mesh) else ():
            start, stop = max(low, part.start), min(high, part.stop)
            if start < stop:
                yield gradient.shard[start:stop]


def _sum_of_squares(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of a 1-D tensor: float64, 0-dim."""
    # Row by row, because an fp32 sum over ten million elements is wrong in the fourth digit on a CPU, and in at least
    # fp32, because a norm may be beyond the range of 16 bits when no element is.
    wide = torch.promote_types(values.dtype, torch.float32)
    whole = values.numel() // NORM_ROW * NORM_ROW
    norms = torch.linalg.vector_norm(values[:whole].view(-1, NORM_ROW), dim=1, dtype=wide)
    rest = torch.linalg.vector_norm(values[whole:], dtype=wide)
    total: torch.Tensor = norms.double().square().sum() + rest.double().square()
    return total
