"""Collectives over MPI as programs of messages; see ``work.py``."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from mpi4py import MPI

from zeromesh.comm.mpi.memory import Tensors, as_landing, as_source, deliver, reduce_parts, spec
from zeromesh.comm.mpi.work import Program, Stage, runtime

# Bytes up to which an all-reduce sends everything to everybody, which is one stage instead of two.
SMALL = 1 << 16


class Programs:
    """Programs of one communicator.

    Each collective has a tag of its own, ``tag()``, which all ranks count alike when they issue it. So the second stage
    of one cannot be taken for another's, in whatever order ranks come to it.
    """

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

    def message(self, received: bool, peer: int, memory: torch.Tensor, tag: int) -> Program:
        """Receive or send one message of a user."""
        if not 0 <= tag <= self.tags:
            raise ValueError(f"the tag is {tag}, but this MPI has room for 0 to {self.tags}")
        yield self.post([(received, peer, memory)], tag)

    def exchange(self, send: Tensors, receive: Tensors, tag: int) -> Program:
        """Send ``send[r]`` to each rank r and receive ``receive[r]`` from it."""
        sources = [as_source(tensor) for tensor in send]
        landings = [as_landing(tensor) for tensor in receive]
        messages = []
        for distance in range(1, self.size):  # nearest first
            source, target = (self.rank - distance) % self.size, (self.rank + distance) % self.size
            messages += [(True, source, landings[source]), (False, target, sources[target])]
        stage = self.post(messages, tag)
        deliver(landings[self.rank], sources[self.rank])  # while the messages are under way
        yield stage
        for tensor, landing in zip(receive, landings, strict=True):
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
