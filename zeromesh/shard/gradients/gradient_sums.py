"""Sums of reduced gradients over ranks with the same parameters (replicas, tensor ranks, tied stages), and their norms.

All ranks call each function, with gradients that all have a shard.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from zeromesh.base.kernels.sums import sum_of_squares
from zeromesh.base.spans import span
from zeromesh.comm.collectives import Group, Pending
from zeromesh.comm.mesh import Mesh
from zeromesh.shard.gradients.gradient import Gradient, GradientPolicy
from zeromesh.shard.tables.table import RowGradient

SHARES = 1 << 22  # elements that are summed over the tensor axis in one message, or one parameter's if that has more

SHARES_TAG = 13  # tag of these messages
TIES_TAG = 64  # first tag, on the pipeline axis, of gradients of parameters that several stages have

# A gradient between two updates, summed over the ranks: of a unit's flat buffer, or of a table's rows.
SummedGradient = Gradient | RowGradient
Place = tuple[SummedGradient, int]  # a parameter: its gradient, and its index there


def sum_copies(gradients: Sequence[Gradient], mesh: Mesh, policy: GradientPolicy, limit: int) -> None:
    """Sum shards over all ranks that hold copies of them."""
    # The order is part of the result: sums in floating point depend on it, and the numerics tests repeat it.
    if mesh.replicate.size > 1:
        _sum_replicas(gradients, mesh, policy, limit)
    _sum_shares(gradients, mesh)
    _sum_ties(gradients, mesh)


def _sum_replicas(gradients: Sequence[Gradient], mesh: Mesh, policy: GradientPolicy, limit: int) -> None:
    sums: deque[tuple[Gradient, torch.Tensor, Callable[[], Pending]]] = deque()
    for gradient in gradients:
        assert gradient.shard is not None
        wire = gradient.shard.to(mesh.device, policy.wire_dtype(gradient.layout))
        sums.append((gradient, wire, mesh.replicate.begin_all_reduce(wire, gradient.tag + 3, mesh.links.reduce)))
        if len(sums) > limit:  # each takes a full copy of a shard on the device
            _end_sum(*sums.popleft())
    while sums:
        _end_sum(*sums.popleft())


def _end_sum(gradient: Gradient, wire: torch.Tensor, send: Callable[[], Pending]) -> None:
    assert gradient.shard is not None
    with span("sum_replicas", gradient.unit):
        send().wait()
        if wire is not gradient.shard:
            gradient.shard.copy_(wire)  # on the current stream, which waits for the collective that has made the sum


def _sum_shares(gradients: Sequence[Gradient], mesh: Mesh) -> None:
    """Sum ranges that several ranks along the tensor axis have, many small ones in one message."""
    for sharers in sorted({sharers for gradient in gradients for sharers in gradient.shared}):
        group = mesh.neighbours("tensor", sharers)
        waiting: list[torch.Tensor] = []
        elements = 0
        for gradient in gradients:
            assert gradient.shard is not None
            for start, stop, _ in gradient.shared.get(sharers, ()):
                part = gradient.shard[start:stop]
                if waiting and (part.dtype != waiting[0].dtype or elements + part.numel() > SHARES):
                    _sum_together(waiting, group)
                    waiting, elements = [], 0
                waiting.append(part)
                elements += part.numel()
        if waiting:
            _sum_together(waiting, group)


def _sum_together(parts: Sequence[torch.Tensor], group: Group) -> None:
    """Sum 1-D tensors of one dtype over the ranks, in place, in one message."""
    with span("sum_shares"):
        together = (parts[0] if len(parts) == 1 else torch.cat(list(parts))).to(group.device)
        group.all_reduce(together, SHARES_TAG)
        if together is not parts[0]:
            for part, total in zip(parts, together.split([part.numel() for part in parts]), strict=True):
                part.copy_(total)


def _sum_ties(gradients: Sequence[Gradient], mesh: Mesh) -> None:
    """Sum gradients of parameters that several stages have, in the order of stages; a use on one counts on all."""
    group = mesh.group("pipeline")
    for number, gradient in enumerate(tied for tied in gradients if tied.tied_stages):
        assert gradient.shard is not None
        used = torch.tensor(gradient.used, dtype=gradient.shard.dtype, device=group.device)
        row = torch.cat([gradient.shard.to(group.device), used])
        rows = {place: row if place == group.rank else torch.empty_like(row) for place in gradient.tied_stages}
        others = [place for place in gradient.tied_stages if place != group.rank]
        sends, receives = dict.fromkeys(others, row), {place: rows[place] for place in others}
        group.send_and_receive(sends, receives, TIES_TAG + number, "tied gradients").wait()
        # All stages add in the same order, so that their copies of the parameters stay equal bit for bit.
        total = rows[gradient.tied_stages[0]].clone()
        for place in gradient.tied_stages[1:]:
            total += rows[place]
        gradient.shard.copy_(total[: gradient.shard.numel()])
        gradient.mark_used(total[gradient.shard.numel() :].bool().tolist())


def squared_norm(gradients: Sequence[SummedGradient], mesh: Mesh) -> torch.Tensor:
    """Return the sum of squares of all that this rank counts of the gradients; float64, shape (1,)."""
    total = torch.zeros(1, dtype=torch.float64, device=mesh.device)
    for gradient in gradients:
        for values in gradient.counted_values(mesh):
            total += sum_of_squares(values)
    return total


def norm_of(places: Sequence[Place], order: float, mesh: Mesh) -> float:
    """Return the norm of gradients of parameters as they are kept, of any positive ``order`` or inf."""
    share = torch.zeros(1, dtype=torch.float64)
    for values in (values for gradient, index in places for values in gradient.counted_values(mesh, index)):
        if order == torch.inf:
            share = torch.maximum(share, values.abs().max().double().cpu())
        elif order == 2:
            share += sum_of_squares(values).cpu()
        else:
            share += values.double().abs().pow(order).sum().cpu()
    rows = mesh.group("world").exchange(share)
    return float(rows.max() if order == torch.inf else rows.sum() ** (1 / order))
