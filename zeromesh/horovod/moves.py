"""Data of an operation that has been decided: what each kind does with its tensors over a process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from zeromesh.horovod.negotiation import ReduceOp

Tensors = list[torch.Tensor]

TORCH_OPS = {
    ReduceOp.Average: dist.ReduceOp.SUM,
    ReduceOp.Sum: dist.ReduceOp.SUM,
    ReduceOp.Min: dist.ReduceOp.MIN,
    ReduceOp.Max: dist.ReduceOp.MAX,
    ReduceOp.Product: dist.ReduceOp.PRODUCT,
}

CARRIED = {torch.bool: torch.uint8, torch.int16: torch.int32}
"""Dtypes that backends do not reduce, and those in which they are."""


@dataclass(frozen=True)
class Members:
    """Process group of a set, its ranks, and the place of this one among them."""

    group: Any
    ranks: Sequence[int]
    rank: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


def _scale(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the tensor times a factor; integers are cut off towards zero, in float64."""
    if factor == 1.0:
        return tensor
    if tensor.dtype.is_floating_point:
        return tensor * factor
    return (tensor.double() * factor).trunc().to(tensor.dtype)


def _reduce(members: Members, decision: dict[str, Any], tensors: Tensors) -> Tensors:
    like = decision["like"]
    op, results = ReduceOp(like["op"]), [torch.empty(0)] * len(tensors)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
        shapes = [tensors[place].shape for place in places]
        # One message for all tensors of a dtype. One tensor alone keeps its shape: views are no good results.
        alone = len(places) == 1
        flat = tensors[places[0]].clone() if alone else torch.cat([tensors[place].reshape(-1) for place in places])
        flat = _scale(flat.to(CARRIED.get(dtype, dtype)), like["prescale_factor"])
        sizes = [shape.numel() for shape in shapes]
        if op is ReduceOp.Adasum:
            flat = torch.cat([_adasum(members, part) for part in flat.reshape(-1).split(sizes)]).view_as(flat)
        elif flat.numel():
            dist.all_reduce(flat, TORCH_OPS[op], group=members.group)
        if op is ReduceOp.Average:
            # A quotient, not a product with 1 / size, which integers would not survive.
            is_integral = not dtype.is_floating_point
            flat = flat.div(members.size, rounding_mode="trunc") if is_integral else flat / members.size
        flat = _scale(flat, like["postscale_factor"]).to(dtype)
        parts = [flat] if alone else flat.split(sizes)
        for place, part, shape in zip(places, parts, shapes, strict=True):
            results[place] = part if alone else part.view(shape)
    return results


def _adasum(members: Members, tensor: torch.Tensor) -> torch.Tensor:
    """Return the adaptive sum of a flat tensor: pairs of neighbours, then pairs of pairs; in float64, rounded once."""
    level = list(_gather_rows(members, tensor.double()))
    while len(level) > 1:
        level = [_adaptive_pair(row, other) for row, other in zip(level[::2], level[1::2], strict=True)]
    return level[0].to(tensor.dtype)


def _adaptive_pair(gradient: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the sum of two gradients, without what they have in common counted twice (Adasum, 2006.02924)."""
    dot, squares = gradient @ other, (gradient @ gradient, other @ other)
    first, second = (1 - dot / (2 * square) if square > 0 else torch.ones_like(dot) for square in squares)
    return first * gradient + second * other


def _gather_rows(members: Members, tensor: torch.Tensor) -> Tensors:
    rows = [torch.empty_like(tensor) for _ in range(members.size)]
    if tensor.numel():
        dist.all_gather(rows, tensor, group=members.group)
    return rows


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor, as backends do not carry all dtypes."""
    return tensor.reshape(-1).view(torch.uint8)


def _row_bytes(tensor: torch.Tensor) -> int:
    return tensor.dtype.itemsize * torch.Size(tensor.shape[1:]).numel()


def _all_gather(members: Members, decision: dict[str, Any], tensors: Tensors) -> Tensors:
    results = []
    for place, tensor in enumerate(tensors):
        sizes = [firsts[place] * _row_bytes(tensor) for firsts in decision["firsts"]]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=tensor.device)
        padded[: tensor.nbytes] = _bytes(tensor)
        rows = _gather_rows(members, padded)
        results.append(tensor.new_empty(sum(firsts[place] for firsts in decision["firsts"]), *tensor.shape[1:]))
        torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)], out=_bytes(results[-1]))
    return results


def _all_to_all(members: Members, decision: dict[str, Any], tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    tensor = tensors[0]
    firsts = [first[0] for first in decision["firsts"]]
    equal = [[first // members.size] * members.size for first in firsts]
    splits = [rank_splits or even for rank_splits, even in zip(decision["splits"], equal, strict=True)]
    received = [row[members.rank] for row in splits]
    size = _row_bytes(tensor)
    out = tensor.new_empty(sum(received), *tensor.shape[1:])
    dist.all_to_all_single(
        _bytes(out),
        _bytes(tensor),
        [rows * size for rows in received],
        [rows * size for rows in splits[members.rank]],
        group=members.group,
    )
    return out, torch.tensor(received, dtype=torch.int32)


def _broadcast(members: Members, decision: dict[str, Any], tensors: Tensors) -> Tensors:
    results = [tensor.clone() for tensor in tensors]
    for result in results:
        if result.numel():
            dist.broadcast(_bytes(result), decision["like"]["root_rank"], group=members.group)
    return results


def _reduce_scatter(members: Members, decision: dict[str, Any], tensors: Tensors) -> Tensors:
    results = []
    for tensor in _reduce(members, decision, tensors):
        rows, more = divmod(tensor.shape[0], members.size)  # the first ranks get one row more
        start = members.rank * rows + min(members.rank, more)
        results.append(tensor[start : start + rows + (members.rank < more)].clone())
    return results


MOVES: dict[str, Callable[[Members, dict[str, Any], Tensors], Any]] = {
    "allreduce": _reduce,
    "allgather": _all_gather,
    "alltoall": _all_to_all,
    "broadcast": _broadcast,
    "reducescatter": _reduce_scatter,
}
"""Kind -> function that returns one result for each tensor; that of alltoall: the rows, and the splits received."""
