"""Operations on tensors: asynchronous ones with handles, and ones that wait and have gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from zeromesh.horovod.negotiation import ReduceOp
from zeromesh.horovod.sets import ProcessSet, global_process_set, included_members
from zeromesh.horovod.world import Handle, world_for

Average, Sum, Adasum, Min, Max, Product = ReduceOp

Tensors = Sequence[torch.Tensor]
Given = TypeVar("Given")


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
        raise ValueError(f"op is {op!r}, but must be hvd.{', hvd.'.join(one.name for one in ReduceOp)}") from None


def _submit(
    kind: str, tensors: Tensors, name: str | None, process_set: ProcessSet, finish: Callable[[Any], Any], call: str,
    **fields: Any,
) -> Handle:  # fmt: skip
    if unknown := [type(tensor).__name__ for tensor in tensors if not isinstance(tensor, torch.Tensor)]:
        raise TypeError(
            f"{call} takes tensors, not {unknown[0]}; hvd.broadcast_object and allgather_object take others"
        )
    world = world_for(call)
    included_members(process_set, call)
    problem = "sparse tensors are not taken; use hvd.sparse_allreduce_async, or tensor.to_dense()"
    sparse = any(tensor.is_sparse for tensor in tensors)
    dense = [tensor.detach().to_dense() for tensor in tensors] if sparse else tensors
    number = process_set.process_set_id or 0
    return world.submit(kind, name, number, dense, finish, problem=problem if sparse else "", **fields)


def _only(results: list[Any]) -> Any:
    return results[0]


def _write(tensors: Given, single: bool = False) -> Callable[[list[torch.Tensor]], Any]:
    """Return the function that writes results into the tensors, and returns these."""

    def write(results: list[torch.Tensor]) -> Any:
        for tensor, result in zip([tensors] if single else list(tensors), results, strict=True):  # type: ignore[call-overload]
            tensor.detach().copy_(result)
        return tensors

    return write


def _reduction(op: ReduceOp, pre: float, post: float) -> dict[str, Any]:
    return {"op": int(op), "prescale_factor": float(pre), "postscale_factor": float(post)}


def allreduce_async(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Handle:  # fmt: skip
    """Start ``allreduce``; return its handle."""
    fields = _reduction(operation(average, op), prescale_factor, postscale_factor)
    return _submit("allreduce", [tensor], name, process_set, _only, "allreduce_async", **fields)


def allreduce_async_(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Handle:  # fmt: skip
    """Start ``allreduce_``; return its handle. The tensor must not be used before it is done."""
    fields = _reduction(operation(average, op), prescale_factor, postscale_factor)
    return _submit("allreduce", [tensor], name, process_set, _write(tensor, True), "allreduce_async_", **fields)


def allreduce_(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> torch.Tensor:  # fmt: skip
    """Reduce a tensor over the ranks, in place, and return it; without gradients."""
    found = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    return _tensor(synchronize(found))


def grouped_allreduce_async(
    tensors: Tensors, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Handle:  # fmt: skip
    """Start ``grouped_allreduce``; return its handle."""
    fields = _reduction(operation(average, op), prescale_factor, postscale_factor)
    return _submit("allreduce", tensors, name, process_set, list, "grouped_allreduce_async", **fields)


def grouped_allreduce_async_(
    tensors: Tensors, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Handle:  # fmt: skip
    """Start ``grouped_allreduce_``; return its handle. The tensors must not be used before it is done."""
    fields = _reduction(operation(average, op), prescale_factor, postscale_factor)
    finish = _write(list(tensors))
    return _submit("allreduce", tensors, name, process_set, finish, "grouped_allreduce_async_", **fields)


def grouped_allreduce_(
    tensors: Tensors, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:  # fmt: skip
    """Reduce each of several tensors over the ranks, in place, and return them; without gradients."""
    found = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    return list(synchronize(found))


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start ``allgather``; return its handle."""
    return _submit("allgather", [tensor], name, process_set, _only, "allgather_async")


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start ``grouped_allgather``; return its handle."""
    return _submit("allgather", tensors, name, process_set, list, "grouped_allgather_async")


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start ``broadcast``; return its handle."""
    return _submit("broadcast", [tensor], name, process_set, _only, "broadcast_async", root_rank=root_rank)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start ``broadcast_``; return its handle. The tensor must not be used before it is done."""
    finish = _write(tensor, True)
    return _submit("broadcast", [tensor], name, process_set, finish, "broadcast_async_", root_rank=root_rank)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Give every rank the values of rank ``root_rank``, in place, and return the tensor; without gradients."""
    return _tensor(synchronize(broadcast_async_(tensor, root_rank, name, process_set)))


def alltoall_async(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start ``alltoall``; return its handle, whose result is the tensor and the received splits."""
    given = None if splits is None else torch.as_tensor(splits).reshape(-1).tolist()
    return _submit("alltoall", [tensor], name, process_set, tuple, "alltoall_async", splits=given)


def reducescatter_async(
    tensor: torch.Tensor, name: str | None = None, op: int = Average, process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Handle:  # fmt: skip
    """Start ``reducescatter``; return its handle."""
    fields = _reduction(operation(None, op), prescale_factor, postscale_factor)
    return _submit("reducescatter", [tensor], name, process_set, _only, "reducescatter_async", **fields)


def grouped_reducescatter_async(
    tensors: Tensors, name: str | None = None, op: int = Average, process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Handle:  # fmt: skip
    """Start ``grouped_reducescatter``; return its handle."""
    fields = _reduction(operation(None, op), prescale_factor, postscale_factor)
    return _submit("reducescatter", tensors, name, process_set, list, "grouped_reducescatter_async", **fields)


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start the sum or mean of sparse tensors; return the function that waits for it and returns a sparse tensor."""
    if op not in (Sum, Average):
        raise ValueError(f"op is {ReduceOp(op).name}, but sparse tensors can be reduced with Sum and Average only")
    own = tensor.detach().coalesce()
    indices = allgather_async(own.indices().t(), f"{name}.indices", process_set)
    values = allgather_async(own.values(), f"{name}.values", process_set)

    def finish() -> torch.Tensor:
        gathered, summands = synchronize(indices), synchronize(values)
        if op == Average:
            summands = summands / included_members(process_set, "sparse_allreduce_async").size
        return torch.sparse_coo_tensor(gathered.t(), summands, own.shape, check_invariants=False)

    return finish


def poll(handle: Handle | Callable[[], Any]) -> bool:
    """Return whether an operation is done, so that ``synchronize`` does not block."""
    return handle.done.is_set() if isinstance(handle, Handle) else False


def synchronize(handle: Any) -> Any:
    """Wait for an operation and return its result.

    Raises:
        HorovodInternalError: ranks contradict each other, or one has ended; see the message.
    """
    if not isinstance(handle, Handle):
        if callable(handle):  # of ``sparse_allreduce_async``
            return handle()
        raise TypeError(f"synchronize takes the handle of an asynchronous operation, not {type(handle).__name__}")
    if not handle.done.is_set():
        world_for("synchronize").wait(handle)
    return handle.outcome()


def _tensor(value: Any) -> torch.Tensor:
    assert isinstance(value, torch.Tensor)
    return value


def join(device: int = -1) -> int:
    """Wait until all ranks have called this; until then, contribute zeros to their allreduces.

    ``device`` changes nothing. Return the rank that was the last to join.
    """
    world = world_for("join")
    return int(world.wait(world.submit("join", None, 0, [])))


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of the set have called this."""
    synchronize(_submit("barrier", [], None, process_set, lambda results: None, "barrier"))
