"""torch's process group over MPI, for host tensors of every dtype.

MPI moves bytes, so it need not know torch's dtypes; sums are torch's, in the order of ranks and, for 16 bits and less,
in fp32 and rounded once, so that every rank has the same value.
"""

# torch declares overloads that nothing calls, and renames what it calls from version to version.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from collections.abc import Sequence
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
    deliver,
    require_one_dtype,
    require_operation,
    require_share,
    spec,
)
from zeromesh.comm.mpi.programs import Programs, delivered
from zeromesh.comm.mpi.work import LEAVING, MpiWork, Program, Stage, runtime


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
        """Name for torch."""
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
        """The name by which torch knows the group."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        """Description that torch gives the group."""
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def rank(self) -> int:
        """This process's number in the group."""
        return self._programs.rank

    def size(self) -> int:
        """Number of processes."""
        return self._programs.size

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a wait may take."""
        self._timeout = timeout.total_seconds()

    def shutdown(self) -> None:
        """Give the communicator back, when what is under way has had some seconds to end: it may have more to send."""
        runtime.finish(self._works, LEAVING)
        if self._programs.comm != MPI.COMM_NULL and not MPI.Is_finalized():
            with runtime.calls:
                self._programs.comm.Free()

    def abort(self) -> None:
        """The same."""
        self.shutdown()

    def _run(self, what: str, program: Program, outputs: Tensors, opts: Any = None) -> MpiWork:
        limit = 0.0 if opts is None else opts.timeout.total_seconds()
        work = MpiWork(f"{what} on mpi", program, limit if limit > 0 else self._timeout, outputs, self._where)
        self._works.add(work)
        runtime.add(work)
        return work

    def _one(self, received: bool, tensors: Tensors, peer: int, tag: int) -> MpiWork:
        if not 0 <= tag <= self._programs.tags:
            raise ValueError(f"the tag is {tag}, but this MPI has room for 0 to {self._programs.tags}")
        (tensor,) = tensors
        memory = as_landing(tensor) if received else as_source(tensor)

        def program() -> Program:
            yield self._programs.post([(received, peer, memory)], tag)
            if received:
                deliver(tensor, memory)

        what = f"{'recv from' if received else 'send to'} rank {self._programs.ranks[peer]}"
        return self._run(f"{what}, tag {tag},", program(), tensors)

    def send(self, tensors: Tensors, target: int, tag: int = 0) -> MpiWork:
        """Send one tensor to a group rank."""
        return self._one(False, tensors, target, tag)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> MpiWork:
        """Receive one tensor from a group rank."""
        return self._one(True, tensors, source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> MpiWork:
        """Receive one tensor from whoever sends it first; the work's ``source_rank`` is who it was."""
        (tensor,) = tensors
        memory, status = as_landing(tensor), MPI.Status()
        others = {self._programs.ranks[rank] for rank in self._programs.others}

        def program() -> Program:
            while True:
                nobody = others <= runtime.gone  # asked first: what they sent before they ended counts
                with runtime.calls:
                    message = self._programs.comm.Improbe(MPI.ANY_SOURCE, tag, status)
                    if message is not None:
                        sources.append(status.source)
                        request = message.Irecv(spec(memory))
                        break
                if nobody:
                    raise RuntimeError("all other ranks have ended")
                yield None
            yield Stage([request], [self._programs.ranks[status.source]], [memory], [True])
            deliver(tensor, memory)

        sources: list[int] = []
        work = self._run(f"recv from any rank, tag {tag},", program(), tensors)
        work.sources = sources
        return work

    # What torch calls.

    def allreduce(self, tensors: Tensors, opts: Any = None) -> MpiWork:
        """Reduce each tensor over the ranks, in place."""
        opts = dist.AllreduceOptions() if opts is None else opts
        require_one_dtype("all_reduce", tensors)
        require_operation(opts.reduceOp, tensors)
        return self._run("all_reduce", self._programs.reduce_all(tensors, opts.reduceOp), tensors, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any = None) -> MpiWork:
        """Reduce a tensor over the ranks, for one of them; the others keep theirs."""
        opts = dist.ReduceOptions() if opts is None else opts
        require_operation(opts.reduceOp, tensors)
        program = self._programs.reduce_all(tensors, opts.reduceOp, opts.rootRank)
        return self._run("reduce", program, tensors, opts)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> MpiWork:
        """Give every rank the values of one."""
        opts = dist.BroadcastOptions() if opts is None else opts
        return self._run("broadcast", self._programs.spread(tensors[opts.rootTensor], opts.rootRank), tensors, opts)

    def allgather(self, rows: Sequence[Tensors], own: Tensors, opts: Any = None) -> MpiWork:
        """Gather every rank's tensor, each into one of a list."""
        pairs = [(list(into), tensor) for into, tensor in zip(rows, own, strict=True)]
        self._require_rows("all_gather", pairs)
        return self._run("all_gather", self._programs.gather_rows(pairs), [t for into in rows for t in into], opts)

    def allgather_coalesced(self, rows: Sequence[Tensors], own: Tensors, opts: Any = None) -> MpiWork:
        """Gather several tensors of every rank: ``rows[r][i]`` becomes rank r's ``own[i]``."""
        return self.allgather(list(zip(*rows, strict=True)), own, opts)

    def all_gather_single(self, out: torch.Tensor, own: torch.Tensor, opts: Any = None) -> MpiWork:
        """Gather every rank's tensor, one after the other."""
        return self.all_gather_single_coalesced([out], [own], opts)

    def all_gather_single_coalesced(self, outs: Tensors, owns: Tensors, opts: Any = None) -> MpiWork:
        """The same for several tensors."""
        landings = [as_landing(out) for out in outs]
        pairs = []
        for own, landing in zip(owns, landings, strict=True):
            require_share("all_gather_into_tensor", landing, own, self._programs.size)
            pairs.append((self._segments(landing), as_source(own).view(-1)))
        program = delivered(self._programs.gather_rows(pairs), outs, landings)
        return self._run("all_gather_into_tensor", program, outs, opts)

    def reduce_scatter(self, outs: Tensors, rows: Sequence[Tensors], opts: Any = None) -> MpiWork:
        """Reduce each of a list of tensors, one for each rank, over the ranks."""
        opts = dist.ReduceScatterOptions() if opts is None else opts
        require_operation(opts.reduceOp, outs)
        pairs = [(list(parts), out) for parts, out in zip(rows, outs, strict=True)]
        self._require_rows("reduce_scatter", pairs)
        return self._run("reduce_scatter", self._programs.reduce_rows(pairs, opts.reduceOp), outs, opts)

    def reduce_scatter_single(self, out: torch.Tensor, full: torch.Tensor, opts: Any = None) -> MpiWork:
        """Reduce a tensor over the ranks, each of which gets its segment."""
        return self.reduce_scatter_single_coalesced([out], [full], opts)

    def reduce_scatter_single_coalesced(self, outs: Tensors, fulls: Tensors, opts: Any = None) -> MpiWork:
        """The same for several tensors."""
        opts = dist.ReduceScatterOptions() if opts is None else opts
        require_operation(opts.reduceOp, outs)
        pairs = []
        for out, full in zip(outs, fulls, strict=True):
            require_share("reduce_scatter_tensor", full, out, self._programs.size)
            pairs.append((self._segments(as_source(full)), out))
        return self._run("reduce_scatter_tensor", self._programs.reduce_rows(pairs, opts.reduceOp), outs, opts)

    def all_to_all_single(
        self, out: torch.Tensor, full: torch.Tensor, received: Sequence[int], sent: Sequence[int], opts: Any = None
    ) -> MpiWork:
        """Send each rank its rows of a tensor; how many, and how many come, is given, or the same for all."""
        landing = as_landing(out)
        receive = self._rows("output", landing, received)
        program = delivered(self._programs.swap(self._rows("input", as_source(full), sent), receive), [out], [landing])
        return self._run("all_to_all_single", program, [out], opts)

    def alltoall(self, outs: Tensors, tensors: Tensors, opts: Any = None) -> MpiWork:
        """Send each rank one of a list of tensors."""
        self._require_number("all_to_all", tensors)
        self._require_number("all_to_all", outs)
        return self._run("all_to_all", self._programs.swap(tensors, outs), outs, opts)

    def gather(self, rows: Sequence[Tensors], own: Tensors, opts: Any = None) -> MpiWork:
        """Gather every rank's tensor on one rank."""
        opts = dist.GatherOptions() if opts is None else opts
        into = rows[0] if rows and self._programs.rank == opts.rootRank else None
        if into is not None:
            self._require_rows("gather", [(into, own[0])])
        return self._run("gather", self._programs.collect(into, own[0], opts.rootRank), into or [], opts)

    def scatter(self, outs: Tensors, rows: Sequence[Tensors], opts: Any = None) -> MpiWork:
        """Give each rank one of a list of tensors that one rank has."""
        opts = dist.ScatterOptions() if opts is None else opts
        parts = rows[0] if rows and self._programs.rank == opts.rootRank else None
        if parts is not None:
            self._require_rows("scatter", [(parts, outs[0])])
        return self._run("scatter", self._programs.deal(parts, outs[0], opts.rootRank), outs, opts)

    def barrier(self, opts: Any = None) -> MpiWork:
        """Done when all ranks have come here."""
        return self._run("barrier", self._programs.meet(), [], opts)

    # The names that torch used before 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _segments(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Equal parts of contiguous memory, one for each rank."""
        return list(tensor.view(self._programs.size, tensor.numel() // self._programs.size))

    def _rows(self, which: str, tensor: torch.Tensor, counts: Sequence[int]) -> Tensors:
        """Rows of a contiguous tensor, some for each rank."""
        rows = tensor.shape[0] if tensor.dim() else 0
        counts = list(counts) or [rows // self._programs.size] * self._programs.size
        if len(counts) != self._programs.size or sum(counts) != rows:
            raise ValueError(
                f"all_to_all_single: the {which} has {rows} rows, which the split sizes {counts} do not divide among "
                f"{self._programs.size} ranks; give a size for each rank, with {rows} as their sum, or a tensor whose "
                "rows divide evenly"
            )
        parts: Tensors = tensor.split(counts)
        return parts

    def _require_number(self, what: str, tensors: Tensors) -> None:
        if len(tensors) != self._programs.size:
            raise ValueError(
                f"{what}: a list has {len(tensors)} tensors, but the group has {self._programs.size} ranks"
            )

    def _require_rows(self, what: str, pairs: Sequence[tuple[Tensors, torch.Tensor]]) -> None:
        for rows, tensor in pairs:
            self._require_number(what, rows)
            own = rows[self._programs.rank]
            if (own.dtype, own.numel()) != (tensor.dtype, tensor.numel()):
                raise ValueError(
                    f"{what}: of the list, this rank's tensor has {own.numel()} elements of {own.dtype}, and the other "
                    f"tensor {tensor.numel()} of {tensor.dtype}; they must be alike"
                )
