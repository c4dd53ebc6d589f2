"""Collectives over MPI as programs of messages; see ``work.py``.

Each collective has tags of its own, which all ranks count alike when they issue it. So the second stage of one cannot
be taken for another's, in whatever order ranks come to it. The first stage is posted by the caller.
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

MaybeTensors = Sequence[torch.Tensor | None]


class Programs:
    """Programs of one communicator. Each method is called when its collective is issued.

    Attributes:
        comm: the communicator, the group's own.
        ranks: the numbers of its ranks in the whole run.
        rank: this process's number in it.
        size: number of processes.
        tags: the largest tag of users' messages; those of collectives are above.
    """

    def __init__(self, comm: MPI.Comm, ranks: Sequence[int]) -> None:
        self.comm = comm
        self.ranks = list(ranks)
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.tags: int = (comm.Get_attr(MPI.TAG_UB) or 32767) // 2
        self._count = itertools.count()

    def tag(self) -> int:
        """Return the tag of the next collective."""
        return self.tags + 1 + next(self._count) % (self.tags - 1)

    def post(self, messages: Iterable[tuple[bool, int, torch.Tensor]], tag: int) -> Stage:
        """Post messages, each ``(received, peer, contiguous memory)``."""
        stage = Stage([], [], [], [])
        with runtime.calls:
            for received, peer, tensor in messages:
                post = self.comm.Irecv if received else self.comm.Isend
                stage.requests.append(post(spec(tensor), peer, tag))
                stage.peers.append(self.ranks[peer])
                stage.memory.append(tensor)
                stage.received.append(received)
        return stage

    def exchange(self, send: MaybeTensors, receive: MaybeTensors) -> Program:
        """Send ``send[r]`` to each rank r and receive ``receive[r]`` from it; None stands for no message."""
        return self._exchange(send, receive, self.tag())

    def _exchange(self, send: MaybeTensors, receive: MaybeTensors, tag: int) -> Program:
        sources = [None if tensor is None else as_source(tensor) for tensor in send]
        landings = [None if tensor is None else as_landing(tensor) for tensor in receive]
        messages = []
        for distance in range(1, self.size):  # nearest first
            source, target = (self.rank - distance) % self.size, (self.rank + distance) % self.size
            for received, peer, tensor in ((True, source, landings[source]), (False, target, sources[target])):
                if tensor is not None:
                    messages.append((received, peer, tensor))
        stage = self.post(messages, tag)
        own, landing = sources[self.rank], landings[self.rank]
        if own is not None and landing is not None:
            deliver(landing, own)
        yield stage
        for tensor, landing in zip(receive, landings, strict=True):
            if tensor is not None and landing is not None:
                deliver(tensor, landing)

    def reduce_scatter(self, parts: Tensors, out: torch.Tensor, op: Any) -> Program:
        """Reduce over the ranks the part that each has for this one."""
        return self._reduce_scatter(parts, out, op, self.tag())

    def _reduce_scatter(self, parts: Tensors, out: torch.Tensor, op: Any, tag: int) -> Program:
        sources = [as_source(part).view(-1) for part in parts]
        rows = [torch.empty_like(sources[self.rank]) for _ in parts]
        rows[self.rank] = sources[self.rank]
        yield from self._exchange(sources, rows, tag)
        landing = as_landing(out)
        reduce_parts(rows, landing.view(-1), op)
        deliver(out, landing)

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> Program:
        """Reduce a tensor over the ranks, in place."""
        return self._all_reduce(tensor, op, self.tag(), self.tag())

    def _all_reduce(self, tensor: torch.Tensor, op: Any, one: int, other: int) -> Program:
        plain = as_source(tensor)
        flat = plain.view(-1)
        if flat.nbytes <= SMALL:
            rows = list(torch.empty(self.size, flat.numel(), dtype=flat.dtype))
            yield from self._exchange([flat] * self.size, rows, one)
            reduce_parts(rows, flat, op)
        else:
            segments = flat.tensor_split(self.size)
            mine = segments[self.rank]
            yield from self._reduce_scatter(segments, mine, op, one)
            yield from self._exchange([mine] * self.size, segments, other)
        deliver(tensor, plain)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Program:
        """Send a tensor to all ranks along a binomial tree from the root."""
        return self._broadcast(tensor, root, self.tag())

    def _broadcast(self, tensor: torch.Tensor, root: int, tag: int) -> Program:
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


def in_turn(programs: Sequence[Program]) -> Program:
    """Run several programs as one."""
    for program in programs:
        yield from program


def delivered(program: Program, tensor: torch.Tensor, landing: torch.Tensor) -> Program:
    """Run a program that fills ``landing``, then copy that into ``tensor``."""
    yield from program
    deliver(tensor, landing)
