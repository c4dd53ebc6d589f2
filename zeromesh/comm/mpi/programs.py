"""Collectives over MPI as programs of messages, see ``work.py``, and the tensors that they take."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from mpi4py import MPI

from zeromesh.comm.mpi.work import Program, Stage, runtime

Tensors = Sequence[torch.Tensor]
MaybeTensors = Sequence[torch.Tensor | None]

# Bytes up to which an all-reduce sends everything to everybody, which is one stage instead of two.
SMALL = 1 << 16


CHUNK = 1 << 17  # elements that are summed at once, so that what is converted stays in the processor's cache

_COMBINE: dict[str, Callable[..., torch.Tensor]] = {
    **dict.fromkeys(("SUM", "AVG"), torch.add),
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def _name(op: Any) -> str:
    name: str = getattr(op, "op", op).name  # torch passes a wrapper or the plain operation
    return name


def require_operation(op: Any, tensors: Tensors) -> None:
    """Raise ValueError where a reduction is not known, or the tensors' dtype does not have it."""
    name, dtype = _name(op), tensors[0].dtype
    if name not in _COMBINE:
        raise ValueError(f"the reduction is {name}, but the mpi backend has {', '.join(_COMBINE)}")
    whole = not (dtype.is_floating_point or dtype.is_complex)
    if (
        (name == "AVG" and whole)
        or (name.startswith("B") and not whole)
        or (name in ("MIN", "MAX") and dtype.is_complex)
    ):
        raise ValueError(f"{dtype} has no reduction {name}; use another, such as SUM, or a tensor of another dtype")


def reduce_parts(parts: Tensors, out: torch.Tensor, op: Any) -> None:
    """Reduce ``parts``, 1-D, first to last, into ``out``, which may be one of them; the others do not change."""
    name = _name(op)
    # MPI's own reductions do not support 16 bits everywhere, and their order is not defined. In the order of ranks, 16
    # bits in fp32 and rounded once, every rank has the same value.
    narrow = out.is_floating_point() and out.itemsize <= 2
    combine, dtype = _COMBINE[name], torch.float32 if narrow else out.dtype
    for result, *chunks in zip(out.split(CHUNK), *(part.split(CHUNK) for part in parts), strict=True):
        first, *rest = chunks
        read_later = any(chunk.data_ptr() == result.data_ptr() for chunk in rest[1:])
        total = torch.empty_like(result, dtype=dtype) if narrow or read_later else result
        if not rest:
            total.copy_(first)
        for chunk in rest:
            combine(first.to(dtype), chunk.to(dtype), out=total)
            first = total
        if name == "AVG":
            total.div_(len(parts))
        deliver(result, total)


def _host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor without its graph; raise ValueError unless it is dense and in host memory."""
    if tensor.layout is not torch.strided or not tensor.is_cpu:
        kind = f"on {tensor.device}" if tensor.layout == torch.strided else f"of the layout {tensor.layout}"
        raise ValueError(
            f"a tensor {kind} of shape {tuple(tensor.shape)} was given to the mpi backend, which moves dense tensors "
            "in host memory; move it with .cpu() (or .to_dense()), or use nccl or gloo for devices"
        )
    return tensor.detach()


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def as_source(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy where its memory cannot be sent as it lies."""
    plain = _host(tensor)
    return plain if _is_plain(plain) else plain.resolve_conj().resolve_neg().contiguous()


def as_landing(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself, or a buffer where it cannot be received into."""
    plain = _host(tensor)
    return plain if _is_plain(plain) else torch.empty(plain.shape, dtype=plain.dtype)


def deliver(tensor: torch.Tensor, landing: torch.Tensor) -> None:
    """Copy ``landing`` into the tensor, unless it is its memory."""
    if tensor.data_ptr() != landing.data_ptr() or not _is_plain(tensor):
        tensor.detach().copy_(landing)


def require_share(what: str, full: torch.Tensor, own: torch.Tensor, size: int) -> None:
    """Raise ValueError unless ``full`` has ``size`` times the elements of ``own``, in its dtype."""
    if full.dtype != own.dtype or full.numel() != own.numel() * size:
        raise ValueError(
            f"{what}: the large tensor has {full.numel()} elements of {full.dtype}, the small one {own.numel()} of "
            f"{own.dtype}; the dtypes must be the same, and the first number {size} times the second, one for each rank"
        )


def require_rows(what: str, rows: Tensors, tensor: torch.Tensor, rank: int, size: int) -> None:
    """Raise ValueError unless a list has one tensor for each rank, this rank's like ``tensor``."""
    if len(rows) != size:
        raise ValueError(f"{what}: a list has {len(rows)} tensors, but the group has {size} ranks")
    own = rows[rank]
    if (own.dtype, own.numel()) != (tensor.dtype, tensor.numel()):
        raise ValueError(
            f"{what}: of the list, this rank's tensor has {own.numel()} elements of {own.dtype}, and the other "
            f"tensor {tensor.numel()} of {tensor.dtype}; they must be alike"
        )


class Programs:
    """Programs of one communicator."""

    def __init__(self, comm: MPI.Comm, ranks: Sequence[int]) -> None:
        self.comm = comm  # the group's own
        self.ranks = list(ranks)  # numbers of the group's ranks in the whole run
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        # The largest tag of users' messages; those of collectives are above.
        self.tags: int = (comm.Get_attr(MPI.TAG_UB) or 32767) // 2
        self._count = itertools.count()

    def tag(self) -> int:
        """Return the tag of the next collective; called when that is issued."""
        # All ranks count alike. So the second stage of a collective cannot be taken for another's, in whatever order
        # ranks come to it.
        return self.tags + 1 + next(self._count) % (self.tags - 1)

    def post(self, messages: Iterable[tuple[bool, int, torch.Tensor]], tag: int) -> Stage:
        """Post messages, each ``(received, peer, contiguous memory)``."""

        def buffer(tensor: torch.Tensor) -> list[Any]:  # which does not keep the tensor alive
            return [MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes), MPI.BYTE]

        posted = list(messages)
        with runtime.calls:
            requests = [
                (self.comm.Irecv if received else self.comm.Isend)(buffer(tensor), peer, tag)
                for received, peer, tensor in posted
            ]
        return Stage([(received, self.ranks[peer], tensor) for received, peer, tensor in posted], requests)

    def message(self, received: bool, peer: int, memory: torch.Tensor, tag: int) -> Program:
        """Receive or send one message of a user."""
        if not 0 <= tag <= self.tags:
            raise ValueError(f"the tag is {tag}, but this MPI has room for 0 to {self.tags}")
        yield self.post([(received, peer, memory)], tag)

    def exchange(self, send: MaybeTensors, receive: MaybeTensors, tag: int) -> Program:
        """Send ``send[r]`` to each rank r and receive ``receive[r]`` from it; None stands for no message."""
        sources = [None if tensor is None else as_source(tensor) for tensor in send]
        landings = [None if tensor is None else as_landing(tensor) for tensor in receive]
        messages = []
        for distance in range(1, self.size):  # nearest first
            source, target = (self.rank - distance) % self.size, (self.rank + distance) % self.size
            for received, peer, memory in ((True, source, landings[source]), (False, target, sources[target])):
                if memory is not None:
                    messages.append((received, peer, memory))
        stage = self.post(messages, tag)
        own, place = sources[self.rank], landings[self.rank]
        if own is not None and place is not None:
            deliver(place, own)  # while the messages are under way
        yield stage
        for tensor, landing in zip(receive, landings, strict=True):
            if tensor is not None and landing is not None:
                deliver(tensor, landing)

    def reduce_scatter(self, parts: Tensors, out: torch.Tensor, op: Any, tag: int) -> Program:
        """Reduce over the ranks the part that each has for this one."""
        sources = [as_source(part).view(-1) for part in parts]
        rows = [torch.empty_like(sources[self.rank]) for _ in parts]
        rows[self.rank] = sources[self.rank]
        yield from self.exchange(sources, rows, tag)
        landing = as_landing(out)
        reduce_parts(rows, landing.view(-1), op)
        deliver(out, landing)

    def all_reduce(self, tensor: torch.Tensor, op: Any, tag: int) -> Program:
        """Reduce a tensor over the ranks, in place."""
        plain = as_source(tensor)
        flat = plain.view(-1)
        if flat.nbytes <= SMALL:
            rows = list(torch.empty(self.size, flat.numel(), dtype=flat.dtype))
            yield from self.exchange([flat] * self.size, rows, tag)
            reduce_parts(rows, flat, op)
        else:
            segments = flat.tensor_split(self.size)
            mine = segments[self.rank]
            # Both stages have one tag: MPI keeps the order of messages between two ranks that have the same.
            yield from self.reduce_scatter(segments, mine, op, tag)
            yield from self.exchange([mine] * self.size, segments, tag)
        deliver(tensor, plain)

    def broadcast(self, tensor: torch.Tensor, root: int, tag: int) -> Program:
        """Send a tensor to all ranks along a binomial tree from the root."""
        relative, step = (self.rank - root) % self.size, 1
        memory = as_source(tensor) if relative == 0 else as_landing(tensor)
        while step < self.size and not relative & step:
            step *= 2
        if relative:
            yield self.post([(True, (self.rank - step) % self.size, memory)], tag)
        children = []
        while (step := step // 2) > 0:
            if relative + step < self.size:
                children.append((self.rank + step) % self.size)
        yield self.post([(False, child, memory) for child in children], tag)
        if relative:
            deliver(tensor, memory)
