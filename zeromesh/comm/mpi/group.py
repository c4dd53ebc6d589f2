"""torch's process group over MPI, for host tensors of every dtype."""

# torch declares overloads that nothing calls, and renames what it calls from version to version.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from mpi4py import MPI

from zeromesh.comm.mpi.programs import (
    Programs,
    Tensors,
    as_landing,
    as_source,
    deliver,
    require_operation,
    require_rows,
    require_share,
)
from zeromesh.comm.mpi.work import LEAVING, MpiWork, Program, runtime


def _single(coalesced: Callable[..., MpiWork]) -> Callable[..., MpiWork]:
    """Return a method for one tensor, given the one for several."""
    return lambda self, out, tensor, opts=None: coalesced(self, [out], [tensor], opts)


class MpiGroup(dist.ProcessGroup):
    """The ranks of one communicator. Its methods are those that torch calls; see ``torch.distributed``."""

    def __init__(self, comm: MPI.Comm, ranks: Sequence[int], timeout: timedelta) -> None:
        self._programs = Programs(comm, ranks)
        super().__init__(self._programs.rank, self._programs.size)  # type: ignore[call-arg]
        self._timeout = timeout.total_seconds()
        self._works: WeakSet[MpiWork] = WeakSet()
        own = self._programs.ranks[self._programs.rank]
        self._where = f"the group of ranks {', '.join(map(str, self._programs.ranks))} (this is rank {own})"
        self._name = self._description = "undefined"

    def getBackendName(self) -> str:
        """Return the name for torch."""
        return "mpi"

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> MpiGroup:
        if device.type != "cpu":
            raise RuntimeError(f"the backend mpi has nothing for tensors on {device}, only for cpu")
        return self

    # The base class keeps names in its C++ backends, of which a group in Python has none.
    @property
    def group_name(self) -> str:
        """Name by which torch knows the group."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        """Description that torch gives the group."""
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def shutdown(self) -> None:
        """Give the communicator back."""
        runtime.finish(self._works, LEAVING)  # what is under way may have more to send
        if self._programs.comm != MPI.COMM_NULL and not MPI.Is_finalized():
            with runtime.calls:
                self._programs.comm.Free()

    abort = shutdown

    def _run(self, what: str, program: Program, outputs: Tensors, opts: Any = None) -> MpiWork:
        limit = 0.0 if opts is None else opts.timeout.total_seconds()
        work = MpiWork(f"{what} on mpi", program, limit if limit > 0 else self._timeout, outputs, self._where)
        self._works.add(work)
        runtime.add(work)
        return work

    def send(self, tensors: Tensors, target: int, tag: int = 0) -> MpiWork:
        """Send one tensor to a group rank."""
        program = self._programs.message(False, target, as_source(tensors[0]), tag)
        return self._run(f"send to rank {self._programs.ranks[target]}, tag {tag},", program, tensors)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> MpiWork:
        """Receive one tensor from a group rank."""

        def receive() -> Program:
            memory = as_landing(tensors[0])
            yield from self._programs.message(True, source, memory, tag)
            deliver(tensors[0], memory)

        return self._run(f"recv from rank {self._programs.ranks[source]}, tag {tag},", receive(), tensors)

    def allreduce(self, tensors: Tensors, opts: Any = None) -> MpiWork:
        """Reduce each tensor over the ranks, in place."""
        opts = opts or dist.AllreduceOptions()
        require_operation(opts.reduceOp, tensors)
        tag = self._programs.tag()

        def one_by_one() -> Program:
            for tensor in tensors:
                yield from self._programs.all_reduce(tensor, opts.reduceOp, tag)

        return self._run("all_reduce", one_by_one(), tensors, opts)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Tensors, opts: Any = None) -> MpiWork:
        """Give every rank the values of one."""
        opts = opts or dist.BroadcastOptions()
        program = self._programs.broadcast(tensors[opts.rootTensor], opts.rootRank, self._programs.tag())
        return self._run("broadcast", program, tensors, opts)

    def allgather(self, rows: Sequence[Tensors], own: Tensors, opts: Any = None) -> MpiWork:
        """Gather every rank's tensor, each into one of a list."""
        into, size = rows[0], self._programs.size
        require_rows("all_gather", into, own[0], self._programs.rank, size)
        program = self._programs.exchange([own[0]] * size, into, self._programs.tag())
        return self._run("all_gather", program, into, opts)

    def all_gather_single_coalesced(self, outs: Tensors, owns: Tensors, opts: Any = None) -> MpiWork:
        """Gather several tensors, those of the ranks one after the other."""
        size, tag = self._programs.size, self._programs.tag()
        for out, own in zip(outs, owns, strict=True):
            require_share("all_gather_into_tensor", out, own, size)

        def one_by_one() -> Program:
            for out, own in zip(outs, owns, strict=True):
                landing = as_landing(out)
                yield from self._programs.exchange(
                    [as_source(own).view(-1)] * size, list(landing.view(size, own.numel())), tag
                )
                deliver(out, landing)

        return self._run("all_gather_into_tensor", one_by_one(), outs, opts)

    def reduce_scatter_single_coalesced(self, outs: Tensors, fulls: Tensors, opts: Any = None) -> MpiWork:
        """Reduce several tensors over the ranks, each of which gets its segments."""
        opts, size, tag = opts or dist.ReduceScatterOptions(), self._programs.size, self._programs.tag()
        require_operation(opts.reduceOp, outs)
        for out, full in zip(outs, fulls, strict=True):
            require_share("reduce_scatter_tensor", full, out, size)

        def one_by_one() -> Program:
            for out, full in zip(outs, fulls, strict=True):
                parts = list(as_source(full).view(size, out.numel()))
                yield from self._programs.reduce_scatter(parts, out, opts.reduceOp, tag)

        return self._run("reduce_scatter_tensor", one_by_one(), outs, opts)

    def reduce(self, tensors: Tensors, opts: Any = None) -> MpiWork:
        """Reduce a tensor over the ranks, for one of them; the others keep theirs."""
        opts = opts or dist.ReduceOptions()
        require_operation(opts.reduceOp, tensors)
        tensor = tensors[0] if self._programs.rank == opts.rootRank else tensors[0].clone()
        program = self._programs.all_reduce(tensor, opts.reduceOp, self._programs.tag())
        return self._run("reduce", program, tensors, opts)

    def reduce_scatter(self, outs: Tensors, rows: Sequence[Tensors], opts: Any = None) -> MpiWork:
        """Reduce each of a list of tensors, one for each rank, over the ranks."""
        opts = opts or dist.ReduceScatterOptions()
        require_operation(opts.reduceOp, outs)
        require_rows("reduce_scatter", rows[0], outs[0], self._programs.rank, self._programs.size)
        program = self._programs.reduce_scatter(rows[0], outs[0], opts.reduceOp, self._programs.tag())
        return self._run("reduce_scatter", program, outs, opts)

    def gather(self, rows: Sequence[Tensors], own: Tensors, opts: Any = None) -> MpiWork:
        """Gather every rank's tensor on one rank."""
        opts = opts or dist.GatherOptions()
        into: Tensors = rows[0] if rows and self._programs.rank == opts.rootRank else []
        if into:
            require_rows("gather", into, own[0], self._programs.rank, self._programs.size)
        sent = self._only(opts.rootRank, own[0])
        program = self._programs.exchange(sent, into or [None] * len(sent), self._programs.tag())
        return self._run("gather", program, into, opts)

    def scatter(self, outs: Tensors, rows: Sequence[Tensors], opts: Any = None) -> MpiWork:
        """Give each rank one of a list of tensors that one rank has."""
        opts = opts or dist.ScatterOptions()
        parts: Tensors = rows[0] if rows and self._programs.rank == opts.rootRank else []
        if parts:
            require_rows("scatter", parts, outs[0], self._programs.rank, self._programs.size)
        received = self._only(opts.rootRank, outs[0])
        program = self._programs.exchange(parts or [None] * len(received), received, self._programs.tag())
        return self._run("scatter", program, outs, opts)

    def alltoall(self, outs: Tensors, tensors: Tensors, opts: Any = None) -> MpiWork:
        """Send each rank one of a list of tensors."""
        for tensor_list in (outs, tensors):
            require_rows("all_to_all", tensor_list, tensor_list[0], 0, self._programs.size)
        return self._run("all_to_all", self._programs.exchange(tensors, outs, self._programs.tag()), outs, opts)

    def all_to_all_single(
        self, out: torch.Tensor, full: torch.Tensor, received: Sequence[int], sent: Sequence[int], opts: Any = None
    ) -> MpiWork:
        """Send each rank its rows of a tensor; without numbers of rows, each gets as many."""
        landing, size, tag = as_landing(out), self._programs.size, self._programs.tag()
        parts, into = _rows("input", as_source(full), sent, size), _rows("output", landing, received, size)

        def exchange() -> Program:
            yield from self._programs.exchange(parts, into, tag)
            deliver(out, landing)

        return self._run("all_to_all_single", exchange(), [out], opts)

    def _only(self, root: int, tensor: torch.Tensor) -> list[torch.Tensor | None]:
        return [tensor if rank == root else None for rank in range(self._programs.size)]

    # Further names, of which torch calls some, depending on its version.
    all_gather_single = _allgather_base = _single(all_gather_single_coalesced)
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_single = _reduce_scatter_base = _single(reduce_scatter_single_coalesced)
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> MpiWork:
        """Return a work that is done when all ranks have called this."""
        nothing = [torch.empty(0)] * self._programs.size
        return self._run("barrier", self._programs.exchange(nothing, nothing, self._programs.tag()), [], opts)


def _rows(which: str, tensor: torch.Tensor, counts: Sequence[int], size: int) -> Tensors:
    """Return the rows of a contiguous tensor for each rank."""
    rows = tensor.shape[0] if tensor.dim() else 0
    counts = list(counts) or [rows // size] * size
    if len(counts) != size or sum(counts) != rows:
        raise ValueError(
            f"all_to_all_single: the {which} has {rows} rows, which the split sizes {counts} do not divide among "
            f"{size} ranks; give a size for each rank, with {rows} as their sum, or a tensor whose rows divide evenly"
        )
    parts: Tensors = tensor.split(counts)
    return parts
