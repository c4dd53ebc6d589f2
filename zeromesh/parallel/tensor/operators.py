"""Messages along the tensor or the context axis where an activation enters or leaves a split part.

Operators f and g of Shoeybi et al., "Megatron-LM", 2019; those over the sequence are of Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models", 2022.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zeromesh.comm.collectives import Group, Pending

# Name -> what is done forward, and with the gradient. Ranks gather or keep equal parts of one dim.
CONJUGATES = {
    "copy": ("nothing", "sum"),  # f
    "sum": ("sum", "nothing"),  # g
    "total": ("sum", "sum"),  # where each rank uses the sum in a share of the loss
    # For the input of split layers: each rank has a share of the gradient of the whole, so the shares are summed.
    "gather": ("gather", "scatter"),
    "scatter": ("scatter", "gather"),
    "split": ("keep", "gather"),
    # For an activation that all ranks use alike: each rank has the whole gradient already, and a sum would be too large
    # by the number of ranks.
    "join": ("gather", "keep"),
    "swap": ("swap", "swap"),  # its own transpose: part r for that of rank r
}


def move(x: Tensor, name: str, group: Group, tag: int, dim: int = 0) -> Tensor:
    """Apply an operator of ``CONJUGATES``; it can be differentiated any number of times.

    ``x`` has any floating dtype, and the same shape on all ranks. ``tag`` distinguishes operators that are under way at
    the same time. Raise ValueError if the ranks do not divide a dim of which they keep parts.
    """
    if group.size == 1:
        return x
    moved: Tensor = _Move.apply(x, *CONJUGATES[name], group, tag, dim % x.ndim)  # type: ignore[no-untyped-call]
    return moved


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forth: str, back: str, group: Group, tag: int, dim: int) -> Tensor:
        ctx.settings = (back, forth, group, tag, dim)
        return DONE[forth](x, group, tag, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # The conjugate of the conjugate is the operator itself, which gives derivatives of any order.
        moved: Tensor = _Move.apply(gradient, *ctx.settings)  # type: ignore[no-untyped-call]
        return moved, None, None, None, None, None


def _nothing(x: Tensor, group: Group, tag: int, dim: int) -> Tensor:
    same: Tensor = x.view_as(x)
    return same


def _sum(x: Tensor, group: Group, tag: int, dim: int) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    group.all_reduce(total.view(-1), tag)
    return total


def _keep(x: Tensor, group: Group, tag: int, dim: int) -> Tensor:
    return x.narrow(dim, *_part(x, group, dim)).clone(memory_format=torch.contiguous_format)


def _gather(x: Tensor, group: Group, tag: int, dim: int) -> Tensor:
    parts = x.new_empty(group.size, *x.shape)
    group.all_gather(parts.view(-1), x.contiguous().view(-1), tag).wait()
    gathered: Tensor = parts.movedim(0, dim).flatten(dim, dim + 1).contiguous()
    # A view that was made here could not be written to.
    return gathered.data if gathered._is_view() else gathered


def scatter(x: Tensor, group: Group, tag: int, dim: int) -> tuple[Tensor, Pending]:
    """Start a reduce-scatter; return this rank's part of the dim, which is valid after the pending work."""
    _, length = _part(x, group, dim)
    # Each rank's part must be one piece of the buffer; where dim is not the first, that takes a copy.
    full = x.unflatten(dim, (group.size, length)).movedim(dim, 0).clone(memory_format=torch.contiguous_format)
    part = torch.empty_like(full[0])
    received = full.new_empty(group.receive_elements(part.numel()))
    # Sums may be wider than the messages; they are rounded once, at the end.
    dtype = group.sum_dtype(part.dtype)
    wide = part.view(-1) if dtype == part.dtype else part.new_empty(part.numel(), dtype=dtype)
    summing = group.reduce_scatter(full.view(-1), received, wide, False, tag)
    if dtype == part.dtype:
        return part, summing

    def round_once() -> None:
        part.view(-1).copy_(wide)

    return part, Pending(works=[summing], then=round_once)


def _scatter(x: Tensor, group: Group, tag: int, dim: int) -> Tensor:
    part, summing = scatter(x, group, tag, dim)
    summing.wait()
    return part


def _swap(x: Tensor, group: Group, tag: int, dim: int) -> Tensor:
    _part(x, group, dim)
    x = x.unflatten(dim, (group.size, -1)).movedim(dim, 0).contiguous()
    received = torch.empty_like(x)
    others = [(group.rank + distance) % group.size for distance in range(1, group.size)]
    sends, receives = {peer: x[peer] for peer in others}, {peer: received[peer] for peer in reversed(others)}
    swapping = group.send_and_receive(sends, receives, tag, "all_to_all")
    received[group.rank].copy_(x[group.rank])
    swapping.wait()
    swapped: Tensor = received.movedim(0, dim).flatten(dim, dim + 1)
    return swapped


def _part(x: Tensor, group: Group, dim: int) -> tuple[int, int]:
    """Return the start and the length of this rank's part of a dim."""
    length, rest = divmod(x.shape[dim], group.size)
    if rest:
        raise ValueError(
            f"dim {dim} of an activation of shape {tuple(x.shape)} has {x.shape[dim]} entries, which {group.size} "
            f"tensor-parallel ranks do not divide; the nearest lengths that work are {length * group.size} and "
            f"{(length + 1) * group.size}"
        )
    return group.rank * length, length


DONE = {"nothing": _nothing, "sum": _sum, "keep": _keep, "gather": _gather, "scatter": _scatter, "swap": _swap}
