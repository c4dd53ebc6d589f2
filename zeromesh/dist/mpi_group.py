"""torch's process group over MPI, for host tensors of every dtype.

MPI moves bytes, so it need not know torch's dtypes; sums are torch's, in the order of ranks and, for 16 bits and less,
in fp32 and rounded once, so that every rank has the same value. Each collective is made of messages, with a tag of its
own that all ranks count alike. So the second stage of one (see ``mpi_work.py``) cannot be taken for another's, in
whatever order ranks come to it.
"""

# torch declares overloads that nothing calls, and renames what it calls from version to version.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from zeromesh.dist.mpi_work import Program, Stage, Work, runtime

Tensors = Sequence[torch.Tensor]

SMALL = 1 << 16
"""Bytes up to which an all-reduce sends everything to everybody, which is one stage instead of two."""

PIECE = 1 << 22
"""Bytes that arrive from all others while as many are summed."""

CHUNK = 1 << 17
"""Elements that are summed at once, so that what is converted stays in the processor's cache."""

_COMBINE: dict[str, Callable[..., torch.Tensor]] = {
    **dict.fromkeys(("SUM", "AVG", "PREMUL_SUM"), torch.add),
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def _name(op: Any) -> str:
    name: str = getattr(op, "op", op).name  # one that carries a factor, or a plain one
    return name


def require_operation(op: Any, tensors: Tensors) -> None:
    """Raise ValueError where a reduction is not known, or the tensors' dtype does not have it."""
    name, dtype = _name(op), tensors[0].dtype
    if name not in _COMBINE:
        raise ValueError(f"the reduction is {name}, but the mpi backend has {', '.join(_COMBINE)}")
    whole = not (dtype.is_floating_point or dtype.is_complex)
    if (name == "AVG" and whole) or (name.startswith("B") and not whole) or (name in ("MIN", "MAX") and dtype.is_complex):
        raise ValueError(f"{dtype} has no reduction {name}; use another, such as SUM, or a tensor of another dtype")


def reduce_parts(parts: Tensors, out: torch.Tensor, op: Any) -> None:
    """``out`` becomes the reduction of ``parts``, 1-D, first to last; one of them may be ``out``, none changes else."""
    name = _name(op)
    narrow = out.is_floating_point() and out.itemsize <= 2
    combine = _COMBINE[name]
    for result, *chunks in zip(out.split(CHUNK), *(part.split(CHUNK) for part in parts), strict=True):
        first, *rest = chunks
        read_later = any(chunk.data_ptr() == result.data_ptr() for chunk in rest[1:])
        dtype = torch.float32 if narrow else out.dtype
        total = torch.empty_like(result, dtype=dtype) if narrow or read_later else result
        if not rest:
            total.copy_(first)
        for chunk in rest:
            combine(first.to(dtype), chunk.to(dtype), out=total)
            first = total
        if name == "AVG":
            total.div_(len(parts))
        elif name == "PREMUL_SUM":
            total.mul_(op.factor)
        _deliver(result, total)


def _require_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        kind = f"on {tensor.device}" if tensor.layout == torch.strided else f"of the layout {tensor.layout}"
        raise ValueError(
            f"a tensor {kind} of shape {tuple(tensor.shape)} was given to the mpi backend, which moves dense tensors in "
            "host memory; move it with .cpu() (or .to_dense()), or use nccl or gloo for devices"
        )
    return tensor.detach()


def _source(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values as they lie in memory that can be sent."""
    return _require_host(tensor).resolve_conj().resolve_neg().contiguous()


def _landing(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or where it cannot be received into, a buffer for it."""
    plain = _require_host(tensor)
    if plain.is_contiguous() and not plain.is_conj() and not plain.is_neg():
        return plain
    return torch.empty(plain.shape, dtype=plain.dtype)


def _deliver(tensor: torch.Tensor, landing: torch.Tensor) -> None:
    """Put what has landed into the tensor, unless it is there."""
    target = tensor.detach()
    if target.data_ptr() != landing.data_ptr() or not target.is_contiguous() or target.is_conj() or target.is_neg():
        target.copy_(landing)


def _spec(tensor: torch.Tensor) -> list[Any]:
    return [MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes), MPI.BYTE]


class Group(dist.ProcessGroup):
    """The ranks of one communicator. Its methods are those that torch calls; see ``torch.distributed``.

    Args:
        comm: the communicator; it is the group's own.
        ranks: their numbers in the whole run, by group rank.
        timeout: how long a wait may take.
    """

    def __init__(self, comm: MPI.Comm, ranks: Sequence[int], timeout: timedelta) -> None:
        self._comm = comm
        self._ranks = list(ranks)
        self._rank, self._size = comm.Get_rank(), comm.Get_size()
        super().__init__(self._rank, self._size)  # type: ignore[call-arg]
        self._others = [rank for rank in range(self._size) if rank != self._rank]
        self._timeout = timeout.total_seconds()
        bound: int = comm.Get_attr(MPI.TAG_UB) or 32767
        # Users' messages have the lower half of the tags, collectives the upper one.
        self._tags = bound // 2
        self._count = itertools.count()
        self._name = self._description = "undefined"

    def getBackendName(self) -> str:  # noqa: N802
        """As torch calls it."""
        return "mpi"

    @property
    def group_name(self) -> str:
        """The name by which torch knows the group."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        """What torch says the group is for."""
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def rank(self) -> int:
        """This process's number in the group."""
        return self._rank

    def size(self) -> int:
        """Number of processes."""
        return self._size

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a wait may take."""
        self._timeout = timeout.total_seconds()

    def shutdown(self) -> None:
        """Give the communicator back."""
        if self._comm != MPI.COMM_NULL and not MPI.Is_finalized():
            with runtime.calls:
                self._comm.Free()

    def abort(self) -> None:
        """The same."""
        self.shutdown()

    # Messages.

    def _tag(self) -> int:
        return self._tags + 1 + next(self._count) % (self._tags - 1)

    def _post(self, messages: Iterable[tuple[bool, int, torch.Tensor]], tag: int) -> Stage:
        """Post messages: whether it is received, from or to which rank, contiguous memory."""
        requests, peers = [], []
        with runtime.calls:
            for received, peer, tensor in messages:
                post = self._comm.Irecv if received else self._comm.Isend
                requests.append(post(_spec(tensor), peer, tag))
                peers.append(self._ranks[peer])
        return Stage(requests, peers)

    def _exchange(self, send: Tensors, receive: Tensors, tag: int) -> Stage:
        """``send[r]`` to each rank r, ``receive[r]`` from it, nearest first; to itself it is copied."""
        messages = []
        for distance in range(1, self._size):
            source, target = (self._rank - distance) % self._size, (self._rank + distance) % self._size
            messages += [(True, source, receive[source]), (False, target, send[target])]
        stage = self._post(messages, tag)
        _deliver(receive[self._rank], send[self._rank])
        return stage

    def _run(self, what: str, program: Program, outputs: Tensors, opts: Any = None) -> Work:
        limit = 0.0 if opts is None else opts.timeout.total_seconds()
        where = f"the group of ranks {', '.join(map(str, self._ranks))} (this is rank {self._ranks[self._rank]})"
        work = Work(f"{what} on mpi", program, limit if limit > 0 else self._timeout, outputs, where)
        runtime.add(work)
        return work

    def _one(self, received: bool, tensors: Tensors, peer: int, tag: int) -> Work:
        if not 0 <= tag <= self._tags:
            raise ValueError(f"the tag is {tag}, but this MPI has room for 0 to {self._tags}")
        (tensor,) = tensors
        memory = _landing(tensor) if received else _source(tensor)

        def program() -> Program:
            yield self._post([(received, peer, memory)], tag)
            if received:
                _deliver(tensor, memory)

        what = f"recv from rank {self._ranks[peer]}" if received else f"send to rank {self._ranks[peer]}"
        return self._run(f"{what}, tag {tag},", program(), tensors)

    def send(self, tensors: Tensors, target: int, tag: int = 0) -> Work:
        """Send one tensor to a group rank."""
        return self._one(False, tensors, target, tag)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Work:
        """Receive one tensor from a group rank."""
        return self._one(True, tensors, source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        """Receive one tensor from whoever sends it first; the work's ``source_rank`` is who it was."""
        (tensor,) = tensors
        memory, status = _landing(tensor), MPI.Status()

        def program() -> Program:
            while True:
                with runtime.calls:
                    message = self._comm.Improbe(MPI.ANY_SOURCE, tag, status)
                    if message is not None:
                        sources.append(status.source)
                        request = message.Irecv(_spec(memory))
                        break
                yield None
            yield Stage([request], [self._ranks[status.source]])
            _deliver(tensor, memory)

        sources: list[int] = []
        work = self._run(f"recv from any rank, tag {tag},", program(), tensors)
        work.sources = sources
        return work

    # Programs.

    def _gather_rows(self, pairs: Sequence[tuple[Tensors, torch.Tensor]]) -> Program:
        """For each pair: its rows become the tensors of the ranks."""
        tags = [self._tag() for _ in pairs]
        work = []
        for (rows, own), tag in zip(pairs, tags, strict=True):
            landings = [_landing(row) for row in rows]
            stage = self._exchange([_source(own)] * self._size, landings, tag)
            work.append((stage, rows, landings))
        yield _together([stage for stage, _, _ in work])
        for _, rows, landings in work:
            for row, landing in zip(rows, landings, strict=True):
                _deliver(row, landing)

    def _sum(self, sources: Tensors, out: torch.Tensor, op: Any, tag: int) -> Program:
        """``out`` becomes the reduction over the ranks of what each has for this one; all 1-D.

        It goes piece by piece, one of which arrives while the one before is summed in the processor's cache.
        """
        length = max(1, PIECE // (out.itemsize * max(1, len(self._others))))
        mine, results = sources[self._rank].split(length), out.split(length)
        landings = [[torch.empty_like(mine[0]) for _ in self._others] for _ in mine[:2]]

        def receive(index: int) -> tuple[Stage, list[torch.Tensor]]:
            parts = [landing[: mine[index].numel()] for landing in landings[index % 2]]
            stage = self._post([(True, rank, part) for rank, part in zip(self._others, parts, strict=True)], tag)
            parts.insert(self._rank, mine[index])
            return stage, parts

        sent = self._post([(False, rank, piece) for rank in self._others for piece in sources[rank].split(length)], tag)
        coming = receive(0)
        for index, result in enumerate(results):
            stage, parts = coming
            yield stage
            if index + 1 < len(results):
                coming = receive(index + 1)
            reduce_parts(parts, result, op)
        yield sent

    def _reduce_rows(self, pairs: Sequence[tuple[Tensors, torch.Tensor]], op: Any) -> Program:
        """For each pair: of its rows, one for each rank, this rank's is reduced over the ranks into its tensor."""
        programs = []
        for rows, out in pairs:
            landing = _landing(out)
            sums = self._sum([_source(row).view(-1) for row in rows], landing.view(-1), op, self._tag())
            programs.append(_delivered(sums, [out], [landing]))
        for program in programs:
            yield from program

    def _reduce_all(self, tensors: Tensors, op: Any, root: int | None = None) -> Program:
        """Reduce tensors of one dtype over the ranks, for all of them or for one."""
        sources = [_source(tensor).view(-1) for tensor in tensors]
        alone = len(sources) == 1 and sources[0].data_ptr() == tensors[0].data_ptr() and root in (None, self._rank)
        flat = sources[0] if alone else torch.cat(sources)
        one, other = self._tag(), self._tag()
        if flat.nbytes <= SMALL:
            rows = torch.empty(self._size, flat.numel(), dtype=flat.dtype)
            yield self._exchange([flat] * self._size, list(rows), one)
            reduce_parts(list(rows), flat, op)
        else:
            segments = flat.tensor_split(self._size)
            mine = segments[self._rank]
            yield from self._sum(segments, mine, op, one)
            if root is None:
                yield self._exchange([mine] * self._size, segments, other)
            elif root == self._rank:
                yield self._post([(True, rank, segments[rank]) for rank in self._others], other)
            else:
                yield self._post([(False, root, mine)], other)
        if root in (None, self._rank) and not alone:
            for tensor, values in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
                tensor.detach().copy_(values.view(tensor.shape))

    def _spread(self, tensor: torch.Tensor, root: int) -> Program:
        """Along a binomial tree from the root."""
        tag, relative, step = self._tag(), (self._rank - root) % self._size, 1
        memory = _source(tensor) if relative == 0 else _landing(tensor)
        while step < self._size and not relative & step:
            step *= 2
        if relative:
            yield self._post([(True, (self._rank - step) % self._size, memory)], tag)
        children = []
        while (step := step // 2) > 0:
            if relative + step < self._size:
                children.append((self._rank + step) % self._size)
        yield self._post([(False, child, memory) for child in children], tag)
        if relative:
            _deliver(tensor, memory)

    def _swap(self, send: Tensors, receive: Tensors) -> Program:
        """Each rank's tensor to it."""
        landings = [_landing(tensor) for tensor in receive]
        yield self._exchange([_source(tensor) for tensor in send], landings, self._tag())
        for tensor, landing in zip(receive, landings, strict=True):
            _deliver(tensor, landing)

    def _collect(self, rows: Tensors | None, own: torch.Tensor, root: int) -> Program:
        tag = self._tag()
        if rows is None:
            memory = _source(own)
            yield self._post([(False, root, memory)], tag)
            return
        landings = [_landing(row) for row in rows]
        _deliver(landings[root], _source(own))
        yield self._post([(True, rank, row) for rank, row in enumerate(landings) if rank != root], tag)
        for row, landing in zip(rows, landings, strict=True):
            _deliver(row, landing)

    def _deal(self, rows: Tensors | None, out: torch.Tensor, root: int) -> Program:
        tag = self._tag()
        if rows is None:
            memory = _landing(out)
            yield self._post([(True, root, memory)], tag)
            _deliver(out, memory)
            return
        sources = [_source(row) for row in rows]
        stage = self._post([(False, rank, row) for rank, row in enumerate(sources) if rank != root], tag)
        out.detach().copy_(sources[root])
        yield stage

    def _meet(self) -> Program:
        """In each round, of twice the distance, every rank hears of twice as many."""
        tag, distance, nothing = self._tag(), 1, torch.empty(0)
        while distance < self._size:
            source, target = (self._rank - distance) % self._size, (self._rank + distance) % self._size
            yield self._post([(True, source, nothing), (False, target, nothing)], tag)
            distance *= 2

    # What torch calls.

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        """Reduce each tensor over the ranks, in place."""
        opts = dist.AllreduceOptions() if opts is None else opts
        _require_one_dtype("all_reduce", tensors)
        require_operation(opts.reduceOp, tensors)
        return self._run("all_reduce", self._reduce_all(tensors, opts.reduceOp), tensors, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any = None) -> Work:
        """Reduce a tensor over the ranks, for one of them; the others keep theirs."""
        opts = dist.ReduceOptions() if opts is None else opts
        require_operation(opts.reduceOp, tensors)
        program = self._reduce_all(tensors, opts.reduceOp, opts.rootRank)
        return self._run("reduce", program, tensors, opts)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Work:
        """Give every rank the values of one."""
        opts = dist.BroadcastOptions() if opts is None else opts
        return self._run("broadcast", self._spread(tensors[opts.rootTensor], opts.rootRank), tensors, opts)

    def allgather(self, rows: Sequence[Tensors], own: Tensors, opts: Any = None) -> Work:
        """Gather every rank's tensor, each into one of a list."""
        pairs = [(list(into), tensor) for into, tensor in zip(rows, own, strict=True)]
        self._require_rows("all_gather", pairs)
        return self._run("all_gather", self._gather_rows(pairs), [t for into in rows for t in into], opts)

    def allgather_coalesced(self, rows: Sequence[Tensors], own: Tensors, opts: Any = None) -> Work:
        """Gather several tensors of every rank: ``rows[r][i]`` becomes rank r's ``own[i]``."""
        return self.allgather(list(zip(*rows, strict=True)), own, opts)

    def all_gather_single(self, out: torch.Tensor, own: torch.Tensor, opts: Any = None) -> Work:
        """Gather every rank's tensor, one after the other."""
        return self.all_gather_single_coalesced([out], [own], opts)

    def all_gather_single_coalesced(self, outs: Tensors, owns: Tensors, opts: Any = None) -> Work:
        """The same for several tensors."""
        landings = [_landing(out) for out in outs]
        pairs = []
        for own, landing in zip(owns, landings, strict=True):
            _require_share("all_gather_into_tensor", landing, own, self._size)
            pairs.append((self._segments(landing), _source(own).view(-1)))
        program = _delivered(self._gather_rows(pairs), outs, landings)
        return self._run("all_gather_into_tensor", program, outs, opts)

    def reduce_scatter(self, outs: Tensors, rows: Sequence[Tensors], opts: Any = None) -> Work:
        """Reduce each of a list of tensors, one for each rank, over the ranks."""
        opts = dist.ReduceScatterOptions() if opts is None else opts
        require_operation(opts.reduceOp, outs)
        pairs = [(list(parts), out) for parts, out in zip(rows, outs, strict=True)]
        self._require_rows("reduce_scatter", pairs)
        return self._run("reduce_scatter", self._reduce_rows(pairs, opts.reduceOp), outs, opts)

    def reduce_scatter_single(self, out: torch.Tensor, full: torch.Tensor, opts: Any = None) -> Work:
        """Reduce a tensor over the ranks, each of which gets its segment."""
        return self.reduce_scatter_single_coalesced([out], [full], opts)

    def reduce_scatter_single_coalesced(self, outs: Tensors, fulls: Tensors, opts: Any = None) -> Work:
        """The same for several tensors."""
        opts = dist.ReduceScatterOptions() if opts is None else opts
        require_operation(opts.reduceOp, outs)
        pairs = []
        for out, full in zip(outs, fulls, strict=True):
            _require_share("reduce_scatter_tensor", full, out, self._size)
            pairs.append((self._segments(_source(full)), out))
        return self._run("reduce_scatter_tensor", self._reduce_rows(pairs, opts.reduceOp), outs, opts)

    def all_to_all_single(
        self, out: torch.Tensor, full: torch.Tensor, received: Sequence[int], sent: Sequence[int], opts: Any = None
    ) -> Work:
        """Send each rank its rows of a tensor; how many, and how many come, is given, or the same for all."""
        landing = _landing(out)
        receive = self._rows("output", landing, received)
        program = _delivered(self._swap(self._rows("input", _source(full), sent), receive), [out], [landing])
        return self._run("all_to_all_single", program, [out], opts)

    def alltoall(self, outs: Tensors, tensors: Tensors, opts: Any = None) -> Work:
        """Send each rank one of a list of tensors."""
        self._require_number("all_to_all", tensors)
        self._require_number("all_to_all", outs)
        return self._run("all_to_all", self._swap(tensors, outs), outs, opts)

    def gather(self, rows: Sequence[Tensors], own: Tensors, opts: Any = None) -> Work:
        """Gather every rank's tensor on one rank."""
        opts = dist.GatherOptions() if opts is None else opts
        into = rows[0] if rows and self._rank == opts.rootRank else None
        if into is not None:
            self._require_rows("gather", [(into, own[0])])
        return self._run("gather", self._collect(into, own[0], opts.rootRank), into or [], opts)

    def scatter(self, outs: Tensors, rows: Sequence[Tensors], opts: Any = None) -> Work:
        """Give each rank one of a list of tensors that one rank has."""
        opts = dist.ScatterOptions() if opts is None else opts
        parts = rows[0] if rows and self._rank == opts.rootRank else None
        if parts is not None:
            self._require_rows("scatter", [(parts, outs[0])])
        return self._run("scatter", self._deal(parts, outs[0], opts.rootRank), outs, opts)

    def barrier(self, opts: Any = None) -> Work:
        """Done when all ranks have come here."""
        return self._run("barrier", self._meet(), [], opts)

    # The names that torch used before 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _segments(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Equal parts of contiguous memory, one for each rank."""
        return list(tensor.view(self._size, tensor.numel() // self._size))

    def _rows(self, which: str, tensor: torch.Tensor, counts: Sequence[int]) -> Tensors:
        """Rows of a contiguous tensor, some for each rank."""
        rows = tensor.shape[0] if tensor.dim() else 0
        counts = list(counts) or [rows // self._size] * self._size
        if len(counts) != self._size or sum(counts) != rows:
            raise ValueError(
                f"all_to_all_single: the {which} has {rows} rows, which the split sizes {counts} do not divide among "
                f"{self._size} ranks; give one size for each rank, with {rows} as their sum, or a tensor whose rows "
                "divide evenly"
            )
        parts: Tensors = tensor.split(counts)
        return parts

    def _require_number(self, what: str, tensors: Tensors) -> None:
        if len(tensors) != self._size:
            raise ValueError(f"{what}: a list has {len(tensors)} tensors, but the group has {self._size} ranks")

    def _require_rows(self, what: str, pairs: Sequence[tuple[Tensors, torch.Tensor]]) -> None:
        for rows, tensor in pairs:
            self._require_number(what, rows)
            own = rows[self._rank]
            if (own.dtype, own.numel()) != (tensor.dtype, tensor.numel()):
                raise ValueError(
                    f"{what}: of the list, this rank's tensor has {own.numel()} elements of {own.dtype}, and the other "
                    f"tensor {tensor.numel()} of {tensor.dtype}; they must be alike"
                )


def _require_share(what: str, full: torch.Tensor, own: torch.Tensor, size: int) -> None:
    if full.dtype != own.dtype or full.numel() != own.numel() * size:
        raise ValueError(
            f"{what}: the large tensor has {full.numel()} elements of {full.dtype}, the small one {own.numel()} of "
            f"{own.dtype}; the dtypes must be the same, and the first number {size} times the second, one for each rank"
        )


def _require_one_dtype(what: str, tensors: Tensors) -> None:
    found = {tensor.dtype for tensor in tensors}
    if len(found) != 1:
        raise ValueError(f"{what}: tensors of {found or 'no dtype'} were given; give tensors of one dtype at a time")


def _together(stages: Sequence[Stage]) -> Stage:
    requests = [request for stage in stages for request in stage.requests]
    return Stage(requests, [peer for stage in stages for peer in stage.peers])


def _delivered(program: Program, tensors: Tensors, landings: Tensors) -> Program:
    """A program, after which what has landed goes to where it belongs."""
    yield from program
    for tensor, landing in zip(tensors, landings, strict=True):
        _deliver(tensor, landing)
