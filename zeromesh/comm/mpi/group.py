"""torch's process group over MPI, for host tensors of every dtype.

MPI moves bytes, so it need not know torch's dtypes; sums are torch's, in the order of ranks and, for 16 bits and less,
in fp32 and rounded once, so that every rank has the same value.
"""

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

from zeromesh.comm.mpi.memory import (
    Tensors,
    as_landing,
    as_source,
    require_number,
    require_operation,
    require_rows,
    require_share,
)
from zeromesh.comm.mpi.programs import Programs, delivered, in_turn
from zeromesh.comm.mpi.work import LEAVING, MpiWork, Program, runtime


def _single(coalesced: Callable[..., MpiWork]) -> Callable[..., MpiWork]:
    """Return a method for one tensor, given the one for several."""

    def single(self: MpiGroup, out: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> MpiWork:
        return coalesced(self, [out], [tensor], opts)

    return single


class MpiGroup(dist.ProcessGroup):
    """The ranks of one communicator. Its methods are those that torch calls; see ``torch.distributed``.

    Args:
        comm: the communicator; it is the group's own.
        ranks: their numbers in the whole run, by group rank.
        timeout: how long a wait may take.
    """

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
        """Give the communicator back, when what is under way has had some seconds to end: it may have more to send."""
        runtime.finish(self._works, LEAVING)
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
        memory = as_source(tensors[0])
        program = _one(self._programs, False, target, memory, tag)
        return self._run(f"send to rank {self._programs.ranks[target]}, tag {tag},", program, tensors)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> MpiWork:
        """Receive one tensor from a group rank."""
        memory = as_landing(tensors[0])
        program = delivered(_one(self._programs, True, source, memory, tag), tensors[0], memory)
        return self._run(f"recv from rank {self._programs.ranks[source]}, tag {tag},", program, tensors)

    def allreduce(self, tensors: Tensors, opts: Any = None) -> MpiWork:
        """Reduce each tensor over the ranks, in place."""
        opts = opts or dist.AllreduceOptions()
        require_operation(opts.reduceOp, tensors)
        program = in_turn([self._programs.all_reduce(tensor, opts.reduceOp) for tensor in tensors])
        return self._run("all_reduce", program, tensors, opts)

    def reduce(self, tensors: Tensors, opts: Any = None) -> MpiWork:
        """Reduce a tensor over the ranks, for one of them; the others keep theirs."""
        opts = opts or dist.ReduceOptions()
        require_operation(opts.reduceOp, tensors)
        tensor = tensors[0] if self._programs.rank == opts.rootRank else tensors[0].clone()
        return self._run("reduce", self._programs.all_reduce(tensor, opts.reduceOp), tensors, opts)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> MpiWork:
        """Give every rank the values of one."""
        opts = opts or dist.BroadcastOptions()
        return self._run("broadcast", self._programs.broadcast(tensors[opts.rootTensor], opts.rootRank), tensors, opts)

    def allgather(self, rows: Sequence[Tensors], own: Tensors, opts: Any = None) -> MpiWork:
        """Gather every rank's tensor, each into one of a list."""
        into, size = rows[0], self._programs.size
        require_rows("all_gather", into, own[0], self._programs.rank, size)
        return self._run("all_gather", self._programs.exchange([own[0]] * size, into), into, opts)

    def all_gather_single_coalesced(self, outs: Tensors, owns: Tensors, opts: Any = None) -> MpiWork:
        """Gather several tensors, those of the ranks one after the other."""
        programs, size = [], self._programs.size
        for out, own in zip(outs, owns, strict=True):
            landing = as_landing(out)
            require_share("all_gather_into_tensor", landing, own, size)
            program = self._programs.exchange([as_source(own).view(-1)] * size, _segments(landing, size))
            programs.append(delivered(program, out, landing))
        return self._run("all_gather_into_tensor", in_turn(programs), outs, opts)

    def reduce_scatter(self, outs: Tensors, rows: Sequence[Tensors], opts: Any = None) -> MpiWork:
        """Reduce each of a list of tensors, one for each rank, over the ranks."""
        opts = opts or dist.ReduceScatterOptions()
        require_operation(opts.reduceOp, outs)
        require_rows("reduce_scatter", rows[0], outs[0], self._programs.rank, self._programs.size)
        program = self._programs.reduce_scatter(rows[0], outs[0], opts.reduceOp)
        return self._run("reduce_scatter", program, outs, opts)

    def reduce_scatter_single_coalesced(self, outs: Tensors, fulls: Tensors, opts: Any = None) -> MpiWork:
        """Reduce several tensors over the ranks, each of which gets its segments."""
        opts = opts or dist.ReduceScatterOptions()
        require_operation(opts.reduceOp, outs)
        programs, size = [], self._programs.size
        for out, full in zip(outs, fulls, strict=True):
            require_share("reduce_scatter_tensor", full, out, size)
            parts = _segments(as_source(full), size)
            programs.append(self._programs.reduce_scatter(parts, out, opts.reduceOp))
        return self._run("reduce_scatter_tensor", in_turn(programs), outs, opts)

    def all_to_all_single(
        self, out: torch.Tensor, full: torch.Tensor, received: Sequence[int], sent: Sequence[int], opts: Any = None
    ) -> MpiWork:
        """Send each rank its rows of a tensor; without numbers of rows, each gets as many."""
        landing, size = as_landing(out), self._programs.size
        program = self._programs.exchange(
            _rows("input", as_source(full), sent, size), _rows("output", landing, received, size)
        )
        return self._run("all_to_all_single", delivered(program, out, landing), [out], opts)

    def alltoall(self, outs: Tensors, tensors: Tensors, opts: Any = None) -> MpiWork:
        """Send each rank one of a list of tensors."""
        require_number("all_to_all", tensors, self._programs.size)
        require_number("all_to_all", outs, self._programs.size)
        return self._run("all_to_all", self._programs.exchange(tensors, outs), outs, opts)

    def gather(self, rows: Sequence[Tensors], own: Tensors, opts: Any = None) -> MpiWork:
        """Gather every rank's tensor on one rank."""
        opts = opts or dist.GatherOptions()
        into: Tensors = rows[0] if rows and self._programs.rank == opts.rootRank else []
        if into:
            require_rows("gather", into, own[0], self._programs.rank, self._programs.size)
        send = _only(opts.rootRank, own[0], self._programs.size)
        return self._run("gather", self._programs.exchange(send, into or [None] * len(send)), into, opts)

    def scatter(self, outs: Tensors, rows: Sequence[Tensors], opts: Any = None) -> MpiWork:
        """Give each rank one of a list of tensors that one rank has."""
        opts = opts or dist.ScatterOptions()
        parts: Tensors = rows[0] if rows and self._programs.rank == opts.rootRank else []
        if parts:
            require_rows("scatter", parts, outs[0], self._programs.rank, self._programs.size)
        receive = _only(opts.rootRank, outs[0], self._programs.size)
        return self._run("scatter", self._programs.exchange(parts or [None] * len(receive), receive), outs, opts)

    def barrier(self, opts: Any = None) -> MpiWork:
        """Return a work that is done when all ranks have called this."""
        nothing = [torch.empty(0)] * self._programs.size
        return self._run("barrier", self._programs.exchange(nothing, nothing), [], opts)

    # Further names for the same, of which torch calls some, depending on its version.
    allreduce_coalesced = allreduce
    all_gather_single = _allgather_base = _single(all_gather_single_coalesced)
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_single = _reduce_scatter_base = _single(reduce_scatter_single_coalesced)
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _one(programs: Programs, received: bool, peer: int, memory: torch.Tensor, tag: int) -> Program:
    if not 0 <= tag <= programs.tags:
        raise ValueError(f"the tag is {tag}, but this MPI has room for 0 to {programs.tags}")
    yield programs.post([(received, peer, memory)], tag)


def _only(rank: int, tensor: torch.Tensor, size: int) -> list[torch.Tensor | None]:
    return [tensor if other == rank else None for other in range(size)]


def _segments(tensor: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Return equal parts of contiguous memory, one for each rank."""
    return list(tensor.view(size, tensor.numel() // size))


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
