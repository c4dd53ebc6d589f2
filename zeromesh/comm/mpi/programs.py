"""Collectives over MPI as programs of messages; see ``work.py``.

Each collective has a tag of its own, which all ranks count alike. So the second stage of one cannot be taken for
another's, in whatever order ranks come to it. What is posted before the first stage is posted by the caller.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from mpi4py import MPI

from zeromesh.comm.mpi.memory import Tensors, as_landing, as_source, deliver, reduce_parts, spec
from zeromesh.comm.mpi.work import Program, Stage, runtime

SMALL = 1 << 16
"""Bytes up to which an all-reduce sends everything to everybody, which is one stage instead of two."""

PIECE = 1 << 22
"""Bytes that arrive from all others while as many are summed."""


class Programs:
    """Programs of one communicator.

    Attributes:
        comm: the communicator, the group's own.
        ranks: the numbers of its ranks in the whole run.
        rank: this process's number in it.
        size: number of processes.
        others: the numbers of the other ones in it.
        tags: the largest tag of users' messages; those of collectives are above.
    """

    def __init__(self, comm: MPI.Comm, ranks: Sequence[int]) -> None:
        self.comm = comm
        self.ranks = list(ranks)
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.others = [rank for rank in range(self.size) if rank != self.rank]
        self.tags: int = (comm.Get_attr(MPI.TAG_UB) or 32767) // 2
        self._count = itertools.count()

    def tag(self) -> int:
        """Return the tag of the next collective."""
        return self.tags + 1 + next(self._count) % (self.tags - 1)

    def post(self, messages: Iterable[tuple[bool, int, torch.Tensor]], tag: int) -> Stage:
        """Post messages: whether it is received, from or to which rank, contiguous memory."""
        stage = Stage([], [], [], [])
        with runtime.calls:
            for received, peer, tensor in messages:
                post = self.comm.Irecv if received else self.comm.Isend
                stage.requests.append(post(spec(tensor), peer, tag))
                stage.peers.append(self.ranks[peer])
                stage.memory.append(tensor)
                stage.received.append(received)
        return stage

    def exchange(self, send: Tensors, receive: Tensors, tag: int) -> Stage:
        """``send[r]`` to each rank r, ``receive[r]`` from it, nearest first; to itself it is copied."""
        messages = []
        for distance in range(1, self.size):
            source, target = (self.rank - distance) % self.size, (self.rank + distance) % self.size
            messages += [(True, source, receive[source]), (False, target, send[target])]
        stage = self.post(messages, tag)
        deliver(receive[self.rank], send[self.rank])
        return stage

    def gather_rows(self, pairs: Sequence[tuple[Tensors, torch.Tensor]]) -> Program:
        """For each pair: its rows become the tensors of the ranks."""
        tags = [self.tag() for _ in pairs]
        work = []
        for (rows, own), tag in zip(pairs, tags, strict=True):
            landings = [as_landing(row) for row in rows]
            stage = self.exchange([as_source(own)] * self.size, landings, tag)
            work.append((stage, rows, landings))
        yield together([stage for stage, _, _ in work])
        for _, rows, landings in work:
            for row, landing in zip(rows, landings, strict=True):
                deliver(row, landing)

    def sum(self, sources: Tensors, out: torch.Tensor, op: Any, tag: int) -> Program:
        """``out`` becomes the reduction over the ranks of what each has for this one; all 1-D.

        It goes piece by piece, one of which arrives while the one before is summed in the processor's cache.
        """
        length = max(1, PIECE // (out.itemsize * max(1, len(self.others))))
        mine, results = sources[self.rank].split(length), out.split(length)
        landings = [[torch.empty_like(mine[0]) for _ in self.others] for _ in mine[:2]]

        def receive(index: int) -> tuple[Stage, list[torch.Tensor]]:
            parts = [landing[: mine[index].numel()] for landing in landings[index % 2]]
            stage = self.post([(True, rank, part) for rank, part in zip(self.others, parts, strict=True)], tag)
            parts.insert(self.rank, mine[index])
            return stage, parts

        sent = self.post([(False, rank, piece) for rank in self.others for piece in sources[rank].split(length)], tag)
        coming = receive(0)
        for index, result in enumerate(results):
            stage, parts = coming
            yield stage
            if index + 1 < len(results):
                coming = receive(index + 1)
            reduce_parts(parts, result, op)
        yield sent

    def reduce_rows(self, pairs: Sequence[tuple[Tensors, torch.Tensor]], op: Any) -> Program:
        """For each pair: of its rows, one for each rank, this rank's is reduced over the ranks into its tensor."""
        programs = []
        for rows, out in pairs:
            landing = as_landing(out)
            sums = self.sum([as_source(row).view(-1) for row in rows], landing.view(-1), op, self.tag())
            programs.append(delivered(sums, [out], [landing]))
        for program in programs:
            yield from program

    def reduce_all(self, tensors: Tensors, op: Any, root: int | None = None) -> Program:
        """Reduce tensors of one dtype over the ranks, for all of them or for one."""
        sources = [as_source(tensor).view(-1) for tensor in tensors]
        alone = len(sources) == 1 and sources[0].data_ptr() == tensors[0].data_ptr() and root in (None, self.rank)
        flat = sources[0] if alone else torch.cat(sources)
        one, other = self.tag(), self.tag()
        if flat.nbytes <= SMALL:
            rows = torch.empty(self.size, flat.numel(), dtype=flat.dtype)
            yield self.exchange([flat] * self.size, list(rows), one)
            reduce_parts(list(rows), flat, op)
        else:
            segments = flat.tensor_split(self.size)
            mine = segments[self.rank]
            yield from self.sum(segments, mine, op, one)
            if root is None:
                yield self.exchange([mine] * self.size, segments, other)
            elif root == self.rank:
                yield self.post([(True, rank, segments[rank]) for rank in self.others], other)
            else:
                yield self.post([(False, root, mine)], other)
        if root in (None, self.rank) and not alone:
            for tensor, values in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
                tensor.detach().copy_(values.view(tensor.shape))

    def spread(self, tensor: torch.Tensor, root: int) -> Program:
        """Along a binomial tree from the root."""
        tag, relative, step = self.tag(), (self.rank - root) % self.size, 1
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

    def swap(self, send: Tensors, receive: Tensors) -> Program:
        """Each rank's tensor to it."""
        landings = [as_landing(tensor) for tensor in receive]
        yield self.exchange([as_source(tensor) for tensor in send], landings, self.tag())
        for tensor, landing in zip(receive, landings, strict=True):
            deliver(tensor, landing)

    def collect(self, rows: Tensors | None, own: torch.Tensor, root: int) -> Program:
        """Each rank's tensor becomes a row on one rank; the others give no rows."""
        tag = self.tag()
        if rows is None:
            memory = as_source(own)
            yield self.post([(False, root, memory)], tag)
            return
        landings = [as_landing(row) for row in rows]
        deliver(landings[root], as_source(own))
        yield self.post([(True, rank, row) for rank, row in enumerate(landings) if rank != root], tag)
        for row, landing in zip(rows, landings, strict=True):
            deliver(row, landing)

    def deal(self, rows: Tensors | None, out: torch.Tensor, root: int) -> Program:
        """Each row of one rank becomes a rank's tensor; the others give no rows."""
        tag = self.tag()
        if rows is None:
            memory = as_landing(out)
            yield self.post([(True, root, memory)], tag)
            deliver(out, memory)
            return
        sources = [as_source(row) for row in rows]
        stage = self.post([(False, rank, row) for rank, row in enumerate(sources) if rank != root], tag)
        out.detach().copy_(sources[root])
        yield stage

    def meet(self) -> Program:
        """In each round, of twice the distance, every rank hears of twice as many."""
        tag, distance, nothing = self.tag(), 1, torch.empty(0)
        while distance < self.size:
            source, target = (self.rank - distance) % self.size, (self.rank + distance) % self.size
            yield self.post([(True, source, nothing), (False, target, nothing)], tag)
            distance *= 2


def together(stages: Sequence[Stage]) -> Stage:
    """Several stages as one."""
    whole = Stage([], [], [], [])
    for stage in stages:
        whole.requests += stage.requests
        whole.peers += stage.peers
        whole.memory += stage.memory
        whole.received += stage.received
    return whole


def delivered(program: Program, tensors: Tensors, landings: Tensors) -> Program:
    """A program, after which what has landed goes to where it belongs."""
    yield from program
    for tensor, landing in zip(tensors, landings, strict=True):
        deliver(tensor, landing)
