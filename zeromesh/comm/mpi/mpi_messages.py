"""Messages between ranks over MPI, and the thread that drives them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from zeromesh.base.worker import Worker

PAUSE = 1e-3  # seconds between two looks of the thread; a look costs some microseconds of the interpreter's lock
LINGER = 100  # looks in vain after which the thread waits to be woken, which costs whoever wakes it more than a look
SPIN = 2e-4  # seconds for which a wait asks without a pause, as small messages take less; then it sleeps in between
NOTICE = 1.0  # seconds of waiting after which a rank asks whether the one that it waits for has ended
LEAVING = 5.0  # seconds that an ending process still gives to messages that nobody waited for
LEFT = 1  # tag of the message by which a rank says that it ends


class MpiMessage:
    """A message under way, with torch's ``wait``; ``peer`` is a rank of the whole run."""

    def __init__(self, request: MPI.Request, received: bool, peer: int, tensor: torch.Tensor, tag: int) -> None:
        self.done = False  # True when it has ended, well or not
        self._request, self._received, self._peer = request, received, peer
        self._tensor: torch.Tensor | None = tensor  # MPI does not keep the memory alive
        self._what = f"{'recv from' if received else 'send to'} rank {peer}, tag {tag}, over mpi"
        self._error: RuntimeError | None = None

    def look(self) -> None:
        """See whether the message is through; ``runtime.calls`` is held."""
        status = MPI.Status()
        try:
            if not self._request.Test(status):
                return
            assert self._tensor is not None
            # MPI takes it for right if what came does not fill its memory.
            if self._received and (count := status.Get_count(MPI.BYTE)) != self._tensor.nbytes:
                raise RuntimeError(
                    f"rank {self._peer} sent {count} bytes where {self._tensor.nbytes} were expected; ranks must give "
                    "tensors of the same dtype and number of elements"
                )
        except RuntimeError as error:  # MPI's own are such, too
            self._error = RuntimeError(f"{self._what} failed: {error}")
        self.done, self._tensor = True, None

    def wait(self) -> None:
        """Block until the message is through; raise RuntimeError if it fails, takes too long, or its peer has ended."""
        began = time.monotonic()
        look = began + NOTICE
        while not self.done:
            runtime.advance()
            now = time.monotonic()
            if now > look:
                look = now + NOTICE
                if self._peer in runtime.find_gone():
                    runtime.advance()  # what it sent before it ended
                    if not self.done:
                        raise RuntimeError(
                            f"{self._what}, waits for rank {self._peer}, which has ended; all ranks must run the same "
                            "collectives, and what the first rank to end says is the cause"
                        )
            if now - began > runtime.timeout and not self.done:
                raise RuntimeError(
                    f"{self._what}, was not done after {runtime.timeout:g} s; the other rank is slower than that, "
                    "ended, or runs another collective: see what the others say; if they are just slow, give "
                    "init_distributed a longer timeout"
                )
            if not self.done:
                time.sleep(0 if now - began < SPIN else min(PAUSE, (now - began) / 20))
        if self._error is not None:
            raise self._error


class Runtime:
    """MPI in this process, and all messages that are under way."""

    def __init__(self) -> None:
        self.calls = threading.RLock()  # held during each call of MPI
        self.notes: MPI.Comm = MPI.COMM_NULL  # of all ranks, for what has to be told beside their messages
        self.timeout = 0.0  # seconds that a message may take
        self._gone: set[int] = set()  # ranks that are known to have ended
        self._pending: dict[MpiMessage, None] = {}
        self._some = threading.Event()
        self._thread: Worker | None = None
        self._ended = False

    def start(self) -> bool:
        """Initialise MPI, unless it is, and return whether it was done here. Collective."""
        ours = not MPI.Is_initialized()
        level = MPI.Init_thread(MPI.THREAD_MULTIPLE) if ours else MPI.Query_thread()
        if level < MPI.THREAD_SERIALIZED:
            raise RuntimeError(
                f"MPI gives the thread level {level}, but messages need MPI_THREAD_SERIALIZED "
                f"({MPI.THREAD_SERIALIZED}) or more, as a thread of its own drives them; leave mpi4py's "
                "rc.thread_level as it is, use an MPI that was built with threads, or dist_backend gloo"
            )
        self.notes = MPI.COMM_WORLD.Dup()
        return ours

    def add(self, message: MpiMessage) -> None:
        """Drive a message until it is through."""
        self._pending[message] = None
        # MPI progresses inside of its own calls only. So a thread looks after all that is under way, and whoever waits
        # looks after everything, too, and more often.
        if self._thread is None:
            self._thread = Worker(self._drive, "mpi")
            self._thread.start()
        self._some.set()

    def advance(self) -> None:
        """See which messages are through."""
        with self.calls:
            for message in tuple(self._pending):
                message.look()
                if message.done:
                    del self._pending[message]

    def _drive(self) -> None:
        idle = 0
        while not self._ended:
            time.sleep(PAUSE)
            if self._pending:
                idle = 0
                self.advance()
            elif (idle := idle + 1) > LINGER:
                self._some.clear()
                if not (self._pending or self._ended):  # else one was added, or this rank ends, just before
                    self._some.wait()

    def find_gone(self) -> set[int]:
        """Return the ranks that have ended."""
        status = MPI.Status()
        with self.calls:
            while self.notes.Iprobe(MPI.ANY_SOURCE, LEFT, status):
                self.notes.Recv([None, 0, MPI.BYTE], status.source, LEFT)
                self._gone.add(status.source)
        return self._gone

    def leave(self) -> bool:
        """Give messages some time, tell the others that this rank ends, and return whether none is under way."""
        until = time.monotonic() + LEAVING
        while self._pending and time.monotonic() < until:
            self.advance()
            time.sleep(PAUSE)
        self._ended = True
        self._some.set()
        if self._thread is not None:
            self._thread.join()
        with self.calls:
            for other in {*range(self.notes.Get_size())} - {self.notes.Get_rank()}:
                self.notes.Isend([None, 0, MPI.BYTE], other, LEFT)
        return not self._pending


runtime = Runtime()
"""Messages of this process."""


class MpiGroup:
    """The ranks of a process group, whose messages MPI carries. The constructor is collective."""

    complete = False  # nothing is summed on its way

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._ranks = dist.get_process_group_ranks(group)
        with runtime.calls:
            members = MPI.COMM_WORLD.Get_group().Incl(self._ranks)
            self._comm = MPI.COMM_WORLD.Create_group(members)  # collective over the members alone
            members.Free()
            self._most: int = self._comm.Get_attr(MPI.TAG_UB) or 32767

    def post(
        self, receives: Iterable[tuple[int, torch.Tensor]], sends: Iterable[tuple[int, torch.Tensor]], tag: int
    ) -> list[Any]:
        """Start messages from and to group ranks; between two ranks they arrive in the order in which they are sent."""
        if not 0 <= tag <= self._most:
            raise ValueError(f"the tag is {tag}, but this MPI has room for 0 to {self._most}; use dist_backend gloo")
        with runtime.calls:
            return [
                *(self._post(True, peer, tensor, tag) for peer, tensor in receives),
                *(self._post(False, peer, tensor, tag) for peer, tensor in sends),
            ]

    def _post(self, received: bool, peer: int, tensor: torch.Tensor, tag: int) -> MpiMessage:
        assert tensor.is_contiguous(), f"strides {tensor.stride()} of shape {tuple(tensor.shape)}"
        memory = [MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes), MPI.BYTE]
        request = (self._comm.Irecv if received else self._comm.Isend)(memory, peer, tag)
        message = MpiMessage(request, received, self._ranks[peer], tensor, tag)
        runtime.add(message)
        return message

    def __del__(self) -> None:
        if "_comm" in vars(self) and not MPI.Is_finalized():
            with runtime.calls:
                self._comm.Free()
