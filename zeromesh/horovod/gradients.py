"""Operations that wait and have gradients, with Horovod's scales.

Horovod averages the gradients of allgather and broadcast over the ranks, and multiplies those of a reducescatter with
``Sum`` by the number of ranks, so that losses count as their mean over the ranks in some operations and as their sum in
others. A script that moves here gets the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zeromesh.horovod.negotiation import ReduceOp
from zeromesh.horovod.operations import (
    Average,
    Compression,
    Sum,
    Tensors,
    allgather_async,
    alltoall_async,
    broadcast_async,
    grouped_allgather_async,
    grouped_allreduce_async,
    grouped_reducescatter_async,
    operation,
    synchronize,
)
from zeromesh.horovod.sets import ProcessSet, global_process_set, included_members
from zeromesh.horovod.world import world_for

Backward = Callable[[list[torch.Tensor]], list[torch.Tensor]]


class _WithGradient(torch.autograd.Function):
    """Runs one function forward, and another one, which may have gradients again, backward."""

    @staticmethod
    def forward(ctx: Any, forward: Callable[[Tensors], list[torch.Tensor]], back: Backward, *tensors: Any) -> Any:
        ctx.back = back
        return tuple(forward(tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return (None, None, *ctx.back(list(gradients)))


def _apply(forward: Callable[[Tensors], Any], back: Backward, tensors: Tensors) -> list[torch.Tensor]:
    return list(_WithGradient.apply(forward, back, *tensors))  # type: ignore[no-untyped-call]


def grouped_allreduce(
    tensors: Tensors, average: bool | None = None, name: str | None = None, compression: Any = Compression.none,
    op: int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:  # fmt: skip
    """Reduce each of several tensors over the ranks, in one message for each dtype; return new tensors.

    See ``allreduce``. The tensors are reduced together: none before all ranks have given all of them.
    """
    found = operation(average, op)
    scales = (prescale_factor, postscale_factor)

    def forward(given: Tensors) -> Any:
        return synchronize(grouped_allreduce_async(given, None, name, found, *scales, process_set))

    def back(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        if found not in (Average, Sum):
            raise NotImplementedError(f"allreduce with op {found.name} has no gradient; use Average or Sum")
        return grouped_allreduce(gradients, None, None, Compression.none, found, *scales, process_set)

    pairs = [compression.compress(tensor) for tensor in tensors]
    results = _apply(forward, back, [tensor for tensor, _ in pairs])
    return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, pairs, strict=True)]


def allreduce(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, compression: Any = Compression.none,
    op: int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:  # fmt: skip
    """Reduce a tensor over the ranks; return a new one.

    Args:
        tensor: of one shape and dtype on all ranks.
        average: deprecated: True is ``op=Average``, False ``op=Sum``.
        name: requests with one name belong together, in whatever order ranks make them; None counts the calls.
        compression: dtype on the way; see ``Compression``.
        op: Average (the default; integers are cut off towards zero), Sum, Adasum, Min, Max or Product.
        prescale_factor: of the tensor, before the reduction.
        postscale_factor: of the result.
        process_set: ranks that take part; this one is among them.

    Raises:
        HorovodInternalError: ranks contradict each other, or one has ended.
    """
    factors = (prescale_factor, postscale_factor)
    return grouped_allreduce([tensor], average, name, compression, op, *factors, process_set)[0]


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Concatenate each of several tensors over the ranks; see ``allgather``."""
    rows = [tensor.shape[0] if tensor.dim() else 1 for tensor in tensors]

    def forward(given: Tensors) -> Any:
        return synchronize(grouped_allgather_async(given, name, process_set))

    def back(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        members = included_members(process_set, "allgather")
        counts = synchronize(allgather_async(torch.tensor([rows]), None, process_set))
        starts = counts[: members.rank].sum(0).tolist()
        means = grouped_allreduce(gradients, op=Average, process_set=process_set)
        return [mean.narrow(0, start, count) for mean, start, count in zip(means, starts, rows, strict=True)]

    return _apply(forward, back, tensors)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenate the ranks' tensors along the first dimension, in the order of ranks.

    The first dimension may differ between ranks, and be 0. The gradient is this rank's part of the mean of all ranks'.
    """
    return grouped_allgather([tensor], name, process_set)[0]


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the tensor of rank ``root_rank``, a global rank also in a process set.

    The gradient is the mean of all ranks' on ``root_rank``, and zeros on the others.
    """

    def back(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        mean = allreduce(gradients[0], op=Average, process_set=process_set)
        return [mean if world_for("broadcast").environment.rank == root_rank else torch.zeros_like(mean)]

    return _apply(lambda given: [synchronize(broadcast_async(given[0], root_rank, name, process_set))], back, [tensor])[
        0
    ]


def alltoall(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send consecutive rows to each rank, and return those received, in the order of ranks.

    Args:
        tensor: of one shape on all ranks but for the first dimension.
        splits: numbers of rows for each rank, as a tensor or list; None divides the rows equally.
        name: as in ``allreduce``.
        process_set: as in ``allreduce``.

    Returns:
        The received rows; with ``splits`` also the number received from each rank, int32, or of the dtype of splits.
    """
    received: list[torch.Tensor] = []

    def forward(given: Tensors) -> Any:
        out, counts = synchronize(alltoall_async(given[0], splits, name, process_set))
        received.append(counts)
        return [out]

    def back(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        return [alltoall(gradients[0], received[0], None, process_set)[0]]

    out = _apply(forward, back, [tensor])[0]
    if splits is None:
        return out
    return out, received[0].to(splits) if isinstance(splits, torch.Tensor) else received[0]


def grouped_reducescatter(
    tensors: Tensors, name: str | None = None, compression: Any = Compression.none, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> list[torch.Tensor]:  # fmt: skip
    """Reduce each of several tensors over the ranks, and return this rank's rows of each; see ``reducescatter``."""
    found: ReduceOp = operation(None, op)

    def forward(given: Tensors) -> Any:
        scales = (prescale_factor, postscale_factor)
        return synchronize(grouped_reducescatter_async(given, name, found, process_set, *scales))

    def back(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        if found not in (Average, Sum):
            raise NotImplementedError(f"reducescatter with op {found.name} has no gradient; use Average or Sum")
        size = included_members(process_set, "reducescatter").size if found is Sum else 1
        factor = prescale_factor * postscale_factor * size
        return grouped_allgather([gradient * factor for gradient in gradients], process_set=process_set)

    pairs = [compression.compress(tensor) for tensor in tensors]
    results = _apply(forward, back, [tensor for tensor, _ in pairs])
    return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, pairs, strict=True)]


def reducescatter(
    tensor: torch.Tensor, name: str | None = None, compression: Any = Compression.none, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> torch.Tensor:  # fmt: skip
    """Reduce a tensor over the ranks and return this rank's rows; the first ranks get one more if they do not divide.

    The gradient is an allgather; with ``Sum``, times the number of ranks.
    """
    factors = (prescale_factor, postscale_factor)
    return grouped_reducescatter([tensor], name, compression, op, process_set, *factors)[0]
