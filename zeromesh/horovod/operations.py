"""Operations on tensors. Each public function is a variant of one of ten functions, told apart by its name.

Horovod averages the gradients of allgather and broadcast over the ranks, and multiplies those of a reducescatter with
``Sum`` by the number of ranks, so that losses count as their mean over the ranks in some operations and as their sum in
others. A script that moves here gets the same numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec

import torch

from zeromesh.horovod.negotiation import ReduceOp
from zeromesh.horovod.sets import ProcessSet, global_process_set, included_members
from zeromesh.horovod.world import Handle, named, world_for

Average, Sum, Adasum, Min, Max, Product = ReduceOp

Tensors = Sequence[torch.Tensor]
Back = Callable[[list[torch.Tensor]], list[torch.Tensor]]
P = ParamSpec("P")


class NoCompression:
    """Tensors are sent as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor to send, and what ``decompress`` needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor in its own dtype."""
        return tensor


class Fp16Compression:
    """Floating-point tensors are sent, and summed, in float16."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor to send, and its own dtype."""
        return (tensor.half() if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor in its own dtype."""
        return tensor.to(ctx)


class Compression:
    """Ways to send a tensor in an allreduce or reducescatter; a class with the same two functions is one, too."""

    none = NoCompression
    fp16 = Fp16Compression


def operation(average: bool | None, op: int | None) -> ReduceOp:
    """Return the reduction that ``op``, or the deprecated ``average``, means: Average if neither is given."""
    if average is not None and op is not None:
        raise ValueError("average and op are both given; leave out average, which is deprecated")
    if average is not None:
        return ReduceOp.Average if average else ReduceOp.Sum
    try:
        return ReduceOp.Average if op is None else ReduceOp(op)
    except ValueError:
        raise ValueError(
            f"op is {op!r}, but must be hvd.{', hvd.'.join(reduction.name for reduction in ReduceOp)}"
        ) from None


def synchronize(handle: Any) -> Any:
    """Wait for an operation and return its result.

    Raises:
        ValueError: arguments are wrong on a rank, or differ between ranks, on every rank.
        HorovodInternalError: a rank has ended; see the message.
    """
    if not isinstance(handle, Handle):
        raise TypeError(f"synchronize takes the handle of an asynchronous operation, not {type(handle).__name__}")
    return handle()


def poll(handle: Handle) -> bool:
    """Return whether an operation is done, so that ``synchronize`` does not block."""
    return handle.done()


def _listed(call: str, argument: Any) -> list[torch.Tensor]:
    """Return the tensors that a call is given: several if its name begins with ``grouped_``, else one."""
    tensors = list(argument) if call.startswith("grouped_") and isinstance(argument, Sequence) else [argument]
    if unknown := [type(tensor).__name__ for tensor in tensors if not isinstance(tensor, torch.Tensor)]:
        what = "a list of tensors" if call.startswith("grouped_") else "a tensor"
        raise TypeError(f"{call} takes {what}, not {unknown[0]}; for objects: broadcast_object, allgather_object")
    return tensors


def _start(
    call: str,
    argument: Any,
    name: str | None,
    process_set: ProcessSet,
    finish: Callable[[Any], Any] | None = None,
    **fields: Any,
) -> Handle:
    """Start the operation of the public function ``call``, ``[grouped_]KIND[_async][_]``, and return its handle.

    With ``_`` at the end, results are written into the given tensors. ``finish`` makes another result of the list.
    """
    world = world_for(call)
    included_members(process_set, call)
    tensors = _listed(call, argument)
    problem = "sparse tensors are not taken; use hvd.sparse_allreduce_async, or tensor.to_dense()"
    sparse = any(tensor.is_sparse for tensor in tensors)
    dense = [tensor.detach().to_dense() for tensor in tensors] if sparse else tensors

    def end(results: Any) -> Any:
        if call.endswith("_"):
            for tensor, result in zip(tensors, results, strict=True):
                tensor.detach().copy_(result)
            results = tensors
        if finish is not None:
            return finish(results)
        # Autograd forbids in-place operations on views that were made in another mode.
        owned = [
            result.clone() if result is not tensor and result._is_view() else result
            for result, tensor in zip(results, tensors, strict=True)
        ]
        return owned[0] if isinstance(argument, torch.Tensor) else owned

    kind = call.removeprefix("grouped_").removesuffix("_").removesuffix("_async")
    number = process_set.process_set_id or 0
    return world.submit(kind, name, number, dense, end, problem=problem if sparse else "", **fields)


def _variant(call: str, base: Callable[Concatenate[str, P], Any]) -> Callable[P, Any]:
    """Return the public function of the name ``call``; it waits for handles unless its name says ``async``."""
    _, *parameters = inspect.signature(base).parameters.values()
    if not _has_gradient(call):
        parameters = [parameter for parameter in parameters if parameter.name != "compression"]
    if call.startswith("grouped_"):
        parameters[0] = parameters[0].replace(name="tensors", annotation="Sequence[torch.Tensor]")
    run: Any = base
    signature = inspect.Signature(parameters)

    def function(*args: P.args, **kwargs: P.kwargs) -> Any:
        arguments: Any = signature.bind(*args, **kwargs).arguments
        arguments["tensor"] = arguments.pop(parameters[0].name)
        result = run(call, **arguments)
        return synchronize(result) if isinstance(result, Handle) and "async" not in call else result

    return named(function, call, base.__doc__, signature=signature)


_ENDS = ("", "_", "_async", "_async_")
"""Ends of the names of variants; see ``allreduce``."""


def _variants(
    name: str, base: Callable[Concatenate[str, P], Any], ends: Sequence[str] = _ENDS
) -> Iterator[Callable[P, Any]]:
    return (_variant(name + end, base) for end in ends)


def _has_gradient(call: str) -> bool:
    """Return whether a public function is differentiable: one that returns new tensors, and no handle."""
    return "async" not in call and not call.endswith("_")


def _scaled(average: bool | None, op: int | None, pre: float, post: float) -> dict[str, Any]:
    return {"op": int(operation(average, op)), "prescale_factor": float(pre), "postscale_factor": float(post)}


def _rows(splits: Any) -> list[int] | None:
    return None if splits is None else torch.as_tensor(splits).reshape(-1).tolist()


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start the sum or mean of sparse tensors; return a handle, which waits and returns the result if it is called."""
    if operation(None, op) not in (Sum, Average):
        raise ValueError(f"op is {ReduceOp(op).name}, but sparse tensors can be reduced with Sum and Average only")
    coalesced = tensor.detach().coalesce()
    size = included_members(process_set, "sparse_allreduce_async").size

    def finish(gathered: list[torch.Tensor]) -> torch.Tensor:
        indices, values = gathered
        values = values / size if op == Average else values
        return torch.sparse_coo_tensor(indices.t(), values, coalesced.shape, check_invariants=False)

    return _start("grouped_allgather_async", [coalesced.indices().t(), coalesced.values()], name, process_set, finish)


def join(device: int = -1) -> int:
    """Wait until all ranks have called this; until then, contribute zeros to their allreduces.

    ``device`` changes nothing. Return the rank that was the last to join.
    """
    return int(world_for("join").submit("join", None, 0, [])())


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of the set have called this."""
    world = world_for("barrier")
    included_members(process_set, "barrier")
    world.submit("barrier", None, process_set.process_set_id or 0, [])()


class _WithGradient(torch.autograd.Function):
    """Runs one function forward, and another one, which may have gradients again, backward."""

    @staticmethod
    def forward(ctx: Any, start: Callable[[Tensors], Handle], back: Back, *tensors: torch.Tensor) -> Any:
        ctx.back = back
        return tuple(start(tensors)())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return (None, None, *ctx.back(list(gradients)))


def _apply(
    call: str,
    argument: Any,
    name: str | None,
    process_set: ProcessSet,
    back: Back,
    compression: Any = Compression.none,
    **fields: Any,
) -> Any:
    """Return the result of the operation of ``call``, whose gradient ``back`` makes of those of the results."""
    included_members(process_set, call)
    pairs = [compression.compress(tensor) for tensor in _listed(call, argument)]
    kind = call.removeprefix("grouped_")

    def start(tensors: Tensors) -> Handle:
        return _start(f"grouped_{kind}", tensors, name, process_set, **fields)

    moved = _WithGradient.apply(start, back, *(tensor for tensor, _ in pairs))  # type: ignore[no-untyped-call]
    results = [compression.decompress(result, ctx) for result, (_, ctx) in zip(moved, pairs, strict=True)]
    return results[0] if isinstance(argument, torch.Tensor) else results


def _require_gradient(call: str, op: ReduceOp) -> None:
    if op not in (Average, Sum):
        raise NotImplementedError(f"{call} with op {op.name} has no gradient; use Average or Sum")


def _allreduce(
    _call: str,
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce a tensor over the ranks; return a new one.

    ``grouped_allreduce`` takes and returns a list; none of its tensors is reduced before all ranks have given all.
    ``_async`` returns a handle for ``synchronize`` and ``poll``. A name that ends with ``_`` writes the results into
    the given tensors, which must not be used before the operation is done. Neither has a gradient.

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
        ValueError: arguments are wrong on a rank, or differ between ranks, on every rank.
        HorovodInternalError: a rank has ended.
    """
    reduction = operation(average, op)
    scales = (prescale_factor, postscale_factor)

    def back(gradients: list[torch.Tensor]) -> Any:
        _require_gradient("allreduce", reduction)
        return grouped_allreduce(gradients, None, None, Compression.none, reduction, *scales, process_set)

    fields = _scaled(None, reduction, *scales)
    if not _has_gradient(_call):
        return _start(_call, tensor, name, process_set, **fields)
    return _apply(_call, tensor, name, process_set, back, compression, **fields)


allreduce, allreduce_, allreduce_async, allreduce_async_ = _variants("allreduce", _allreduce)
grouped_allreduce, grouped_allreduce_, grouped_allreduce_async, grouped_allreduce_async_ = _variants(
    "grouped_allreduce", _allreduce
)


def _allgather(call: str, tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Concatenate the ranks' tensors along the first dimension, in the order of ranks.

    The first dimension may differ between ranks, and be 0. The gradient is this rank's part of the mean of all ranks'.
    ``grouped_allgather`` takes and returns a list. ``_async`` returns a handle, and has no gradient.
    """
    if not _has_gradient(call):
        return _start(call, tensor, name, process_set)
    rows = [part.shape[0] if part.dim() else 1 for part in _listed(call, tensor)]

    def back(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        counts = allgather(torch.tensor([rows], device=gradients[0].device), None, process_set)
        starts = counts[: included_members(process_set, call).rank].sum(0).tolist()
        means = grouped_allreduce(gradients, op=Average, process_set=process_set)
        return [mean.narrow(0, start, count) for mean, start, count in zip(means, starts, rows, strict=True)]

    return _apply(call, tensor, name, process_set, back)


allgather, allgather_async = _variants("allgather", _allgather, _ENDS[::2])
grouped_allgather, grouped_allgather_async = _variants("grouped_allgather", _allgather, _ENDS[::2])


def _broadcast(
    call: str,
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the tensor of rank ``root_rank``, a global rank also in a process set.

    The gradient is the mean of all ranks' on ``root_rank``, and zeros on the others. ``_async`` returns a handle for
    ``synchronize`` and ``poll``. A name that ends with ``_`` writes the result into the given tensor, which must not be
    used before the operation is done. Neither has a gradient.
    """
    if not _has_gradient(call):
        return _start(call, tensor, name, process_set, root_rank=root_rank)

    def back(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        mean = allreduce(gradients[0], op=Average, process_set=process_set)
        return [mean if world_for("broadcast").environment.rank == root_rank else torch.zeros_like(mean)]

    return _apply(call, tensor, name, process_set, back, root_rank=root_rank)


broadcast, broadcast_, broadcast_async, broadcast_async_ = _variants("broadcast", _broadcast)


def _alltoall(
    _call: str,
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send consecutive rows to each rank, and return those received, in the order of ranks.

    Args:
        tensor: of one shape on all ranks but for the first dimension.
        splits: numbers of rows for each rank, as a tensor or list; None divides the rows equally.
        name: as in ``allreduce``.
        process_set: as in ``allreduce``.

    Returns:
        The received rows; with ``splits`` also the number received from each rank, int32, or of the dtype of splits.
        Of ``alltoall_async`` a handle, whose result has both, without gradients.
    """
    if not _has_gradient(_call):
        return _start(_call, tensor, name, process_set, tuple, splits=_rows(splits))
    received: list[torch.Tensor] = []

    def finish(results: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
        received.append(results[1])
        return [results[0]]

    def back(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        return [alltoall(gradients[0], received[0], None, process_set)[0]]

    out = _apply(_call, tensor, name, process_set, back, finish=finish, splits=_rows(splits))
    if splits is None:
        return out
    return out, received[0].to(splits) if isinstance(splits, torch.Tensor) else received[0]


alltoall, alltoall_async = _variants("alltoall", _alltoall, _ENDS[::2])


def _reducescatter(
    call: str,
    tensor: Any,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce a tensor over the ranks and return this rank's rows; the first ranks get one more if they do not divide.

    The gradient is an allgather; with ``Sum``, times the number of ranks. ``grouped_reducescatter`` takes and returns a
    list. ``_async`` returns a handle, and has no gradient. See ``allreduce`` for the arguments.
    """
    reduction = operation(None, op)

    def back(gradients: list[torch.Tensor]) -> Any:
        _require_gradient("reducescatter", reduction)
        factor = prescale_factor * postscale_factor
        factor *= included_members(process_set, call).size if reduction is Sum else 1
        return grouped_allgather([gradient * factor for gradient in gradients], process_set=process_set)

    fields = _scaled(None, reduction, prescale_factor, postscale_factor)
    if not _has_gradient(call):
        return _start(call, tensor, name, process_set, **fields)
    return _apply(call, tensor, name, process_set, back, compression, **fields)


reducescatter, reducescatter_async = _variants("reducescatter", _reducescatter, _ENDS[::2])
grouped_reducescatter, grouped_reducescatter_async = _variants("grouped_reducescatter", _reducescatter, _ENDS[::2])

__all__ = [
    "Adasum", "Average", "Compression", "Max", "Min", "Product", "Sum", "allgather", "allgather_async", "allreduce",
    "allreduce_", "allreduce_async", "allreduce_async_", "alltoall", "alltoall_async", "barrier", "broadcast",
    "broadcast_", "broadcast_async", "broadcast_async_", "grouped_allgather", "grouped_allgather_async",
    "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_",
    "grouped_reducescatter", "grouped_reducescatter_async", "join", "poll", "reducescatter", "reducescatter_async",
    "sparse_allreduce_async", "synchronize",
]  # fmt: skip
