"""Messages between ranks of one machine, copied from memory to memory instead of through sockets.

gloo writes a message into a socket, and reads it from there, some kilobytes at a time. Here the receiver copies it once
(``base/kernels/messages.c``), at about the speed of memory, and no thread needs Python's lock. Messages that are
summed are not even copied: the receiver adds them up as it reads them.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import hashlib
import os
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

from zeromesh.base.kernels.native import SUMMED, library
from zeromesh.comm.messages import gather_rows
from zeromesh.comm.signs import network_place

LEAVING = 1000  # milliseconds that an ending process gives others to copy what was sent to them
_PAUSE = 1000  # milliseconds after which a wait lets Python handle signals

_made: WeakKeyDictionary[Any, Transport] = WeakKeyDictionary()  # by the process group of all ranks
_all: WeakSet[Transport] = WeakSet()
_ending = threading.Event()


class Message:
    """A message under way, with torch's ``wait``."""

    def __init__(self, transport: Transport, tensors: Sequence[torch.Tensor], what: str) -> None:
        self.handle = ctypes.c_void_p()  # null before it is posted, and again when it is through
        self.tensors = tensors  # their memory is read or written until then
        self._transport = transport
        self._what = what

    def wait(self) -> None:
        """Block until the message is through. Raise RuntimeError if the other rank ended, or gave another size."""
        limit = time.monotonic() + self._transport.timeout
        while self.handle:
            result = self._transport.wait(self.handle, _PAUSE)
            if result < 0:
                raise RuntimeError(f"{self._what}: {os.strerror(-result)}")
            if self.handle and time.monotonic() > limit:
                raise RuntimeError(f"{self._what}: not there after the timeout of {self._transport.timeout:.0f} s")

    def __del__(self) -> None:
        if self.handle:
            self._transport.keep(self)


class Transport:
    """This process's messages to and from the ranks whose memory it can read. The constructor is collective.

    Args:
        exchange: makes every rank's vector, as the rows of one matrix on the host, of this rank's.
    """

    def __init__(self, exchange: Callable[[torch.Tensor], torch.Tensor] = gather_rows) -> None:
        rank = dist.get_rank()
        self.timeout = _timeout().total_seconds()
        native_library = library()
        native: Any = native_library.handle if native_library is not None and native_library.has_links else None
        self._native = native
        self._instructions = 0 if native_library is None else native_library.choose(None)
        self._dropped: deque[tuple[ctypes.c_void_p, Sequence[torch.Tensor]]] = deque()
        self._link, self.ranks, self.complete = 0, frozenset[int](), False
        self._of_sums: dict[tuple[int, ...], tuple[Any, str]] = {}  # of ranks, see _sources
        place_number = 1 + int.from_bytes(hashlib.sha256(network_place().encode()).digest()[:7], "big")
        places = exchange(torch.tensor([place_number if native is not None else 0])).flatten().tolist()
        here = [peer for peer, place in enumerate(places) if peer == rank or (place and place == places[rank])]
        # Memory and messages to others are numbered among the ranks of this place, not among all.
        self._number = {peer: number for number, peer in enumerate(here)}
        most = max(Counter(filter(None, places)).values(), default=1)
        if most == 1:
            return
        file, address = ctypes.c_int32(), ctypes.c_uint64()
        if len(here) > 1:
            number, places_of = self._number[rank], (ctypes.byref(file), ctypes.byref(address))
            self._link = native.zeromesh_link_open(number, len(here), *places_of) or 0
        rows = exchange(torch.tensor([os.getpid(), file.value, address.value] if self._link else [0] * 3)).tolist()
        reached = torch.zeros(most, dtype=torch.uint8)
        if self._link:
            for peer, number in self._number.items():
                joins = peer != rank and rows[peer][0]
                reached[number] = joins and not native.zeromesh_link_join(self._link, number, *rows[peer])
            if bool(reached.any()) and native.zeromesh_link_start(self._link):
                reached.zero_()
        every = exchange(reached)
        self.ranks = frozenset(
            peer for peer, number in self._number.items() if reached[number] and every[peer, self._number[rank]]
        )
        self.complete = int(every.sum()) == len(places) * (len(places) - 1)
        if self._link:
            _all.add(self)

    def post(self, sends: bool, rank: int, key: int, tensor: torch.Tensor) -> Message:
        """Start to send a contiguous tensor to a rank of all ranks, or to receive one; both sides give the same key."""
        message = self._message([tensor], f"the message {'to' if sends else 'from'} rank {rank}")
        error = self._native.zeromesh_link_post(
            self._link, sends, self._number[rank], key, tensor.data_ptr(), tensor.nbytes, ctypes.byref(message.handle)
        )
        return self._posted(message, error)

    def add_up(
        self, ranks: Sequence[int], place: int, key: int, part: torch.Tensor, out: torch.Tensor, add: bool
    ) -> Message:
        """Start to receive a message from each of ``ranks``, and to put their sum with ``part`` into ``out``.

        Args:
            ranks: of all ranks, in the order in which they are added.
            place: number of them that ``part`` comes behind.
            key: as for ``post``.
            part: that of this rank, contiguous, of a dtype in ``SUMMED``, as the messages are.
            out: contiguous, of as many elements, also of such a dtype; may be ``part``. Each addition is rounded to it.
            add: add the sum, when it is whole, to what ``out`` holds.
        """
        assert part.shape == out.shape, (part.shape, out.shape)
        numbers, what = self._sources(tuple(ranks))
        message = self._message([part, out], what)
        error = self._native.zeromesh_link_sum(
            self._link,
            self._instructions,
            numbers,
            len(ranks),
            place,
            key,
            part.data_ptr(),
            out.data_ptr(),
            part.numel(),
            SUMMED[part.dtype],
            SUMMED[out.dtype],
            add,
            ctypes.byref(message.handle),
        )
        return self._posted(message, error)

    def _sources(self, ranks: tuple[int, ...]) -> tuple[Any, str]:
        """Return ranks as the native library takes them, and the name of the sum of their messages."""
        if ranks not in self._of_sums:
            numbers = (ctypes.c_int32 * len(ranks))(*(self._number[peer] for peer in ranks))
            self._of_sums[ranks] = numbers, f"the sum of messages from ranks {', '.join(map(str, ranks))}"
        return self._of_sums[ranks]

    def _message(self, tensors: Sequence[torch.Tensor], what: str) -> Message:
        for tensor in tensors:
            assert tensor.is_contiguous(), f"strides {tensor.stride()} of shape {tuple(tensor.shape)}"
            assert tensor.device.type == "cpu", tensor.device
        self._forget_dropped()
        return Message(self, tensors, what)

    @staticmethod
    def _posted(message: Message, error: int) -> Message:
        if error == errno.EPERM:
            raise RuntimeError(
                "a forked process cannot send messages; communicate in the process that called zeromesh.initialize"
            )
        if error:
            raise RuntimeError(f"no message can be sent: {os.strerror(error)}")
        return message

    def wait(self, handle: ctypes.c_void_p, milliseconds: int) -> int:
        """Return 1 if a message is through, 0 if it is not yet, else the negative number of an error.

        ``handle`` is null afterwards unless it is 0. Below 0 milliseconds nothing is done but to look.
        """
        return int(self._native.zeromesh_link_wait(self._link, ctypes.byref(handle), milliseconds))

    def keep(self, message: Message) -> None:
        """Keep the memory of a message that nobody waits for until it is through."""
        self._dropped.append((message.handle, message.tensors))

    def _forget_dropped(self) -> None:
        for _ in range(len(self._dropped)):
            try:  # the garbage collector may add to it at any time, and other threads take from it
                handle, tensors = self._dropped.popleft()
            except IndexError:
                return
            if not self.wait(handle, -1):
                self._dropped.append((handle, tensors))

    def __del__(self) -> None:
        # At the end of the process the memory stays, as messages may be waited for even later.
        if self._link and _ending is not None and not _ending.is_set():  # None once Python has cleared this module
            self.close()
            self._native.zeromesh_link_free(self._link)

    def close(self) -> None:
        """Give others time to copy what was sent to them, and end the thread."""
        if self._link:
            self._native.zeromesh_link_close(self._link, LEAVING)

    @property
    def sent(self) -> int:
        """Bytes of messages that other ranks have copied so far."""
        return int(self._native.zeromesh_link_sent(self._link)) if self._link else 0


class LocalGroup:
    """The ranks of a process group, reached through memory where that is possible, else through torch's group."""

    def __init__(self, transport: Transport, group: Any) -> None:
        self._transport = transport
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)
        # All ranks know a group by the same name; messages of different groups are not taken for each other.
        self._space = zlib.crc32(group.group_name.encode()) << 32
        self._place = self._ranks.index(dist.get_rank())
        self._others = (*self._ranks[: self._place], *self._ranks[self._place + 1 :])

    @classmethod
    def of(cls, transport: Transport, group: Any) -> LocalGroup | None:
        """Return the group, or None if none of its ranks is reached through memory."""
        local_group = cls(transport, group)
        return local_group if transport.ranks.intersection(local_group._ranks) else None

    def post(
        self, receives: Iterable[tuple[int, torch.Tensor]], sends: Iterable[tuple[int, torch.Tensor]], tag: int
    ) -> list[Any]:
        """Start messages from and to group ranks; between two ranks they arrive in the order in which they are sent."""
        return [
            *(self._post(False, peer, tensor, tag) for peer, tensor in receives),
            *(self._post(True, peer, tensor, tag) for peer, tensor in sends),
        ]

    @property
    def complete(self) -> bool:
        """True if all ranks of the group are reached through memory."""
        return self._transport.ranks.issuperset(set(self._ranks) - {dist.get_rank()})

    def add_up(self, part: torch.Tensor, out: torch.Tensor, add: bool, tag: int) -> Message | None:
        """Start to put the sum of ``part`` and a message from each other rank into ``out``, in the order of ranks.

        Of a group that is ``complete``. Return None if sums of such dtypes are not computed here.
        """
        if part.dtype not in SUMMED or out.dtype not in SUMMED:
            return None
        return self._transport.add_up(self._others, self._place, self._space | tag, part, out, add)

    def _post(self, sends: bool, peer: int, tensor: torch.Tensor, tag: int) -> Any:
        rank = self._ranks[peer]
        if rank in self._transport.ranks:
            return self._transport.post(sends, rank, self._space | tag, tensor)
        return self._group.send([tensor], peer, tag) if sends else self._group.recv([tensor], peer, tag)


def transport(required: bool, exchange: Callable[[torch.Tensor], torch.Tensor] = gather_rows) -> Transport:
    """Return the transport among all ranks; the first call is collective, and exchanges rows by ``exchange``.

    Raise ValueError if it is ``required`` and a rank cannot read the memory of another.
    """
    world = dist.group.WORLD
    assert world is not None
    if world not in _made:
        _made[world] = Transport(exchange)
    world_transport = _made[world]
    if required and not world_transport.complete:
        raise ValueError(
            "communication.local_memory is true, but not every rank can read the memory of all others; that "
            "needs ranks on one "
            "Linux machine, in one container or one with CAP_SYS_PTRACE, and ZeroMesh's native library; leave "
            "communication.local_memory out to use it where it is possible"
        )
    return world_transport


def close() -> None:
    """End all transports of this process, so that no other rank waits for it: before its process group is destroyed."""
    for open_transport in list(_all):
        open_transport.close()


@atexit.register
def _leave() -> None:
    _ending.set()
    close()


def bytes_sent() -> int:
    """Return the bytes that this process has sent through memory so far, by transports that it still has."""
    return sum(open_transport.sent for open_transport in _all)


def _timeout() -> timedelta:
    """Return the limit of a collective that torch's group has."""
    assert dist.group.WORLD is not None
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))
    limit: timedelta = getattr(getattr(backend, "options", None), "_timeout", dist.default_pg_timeout)
    return limit
