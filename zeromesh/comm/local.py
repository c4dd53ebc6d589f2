"""Messages between ranks of one machine, out of each other's memory instead of through sockets; see ``kernels/link.c``.

gloo copies a message into a socket and out of it, some kilobytes at a time. Here the receiver copies once, at about the
speed of memory, and no thread needs Python's lock.
"""

from __future__ import annotations

import ctypes
import os
import weakref
import zlib
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from zeromesh.comm.watchdog import PLACE
from zeromesh.kernels.native import library

LEAVING = 1000  # milliseconds that an ending process gives others to copy what was sent to them
_PAUSE = 1000  # milliseconds after which a wait looks for signals

_links: WeakKeyDictionary[Any, Link | None] = WeakKeyDictionary()  # by process group of all ranks


class Message:
    """A message under way, with torch's ``wait``."""

    def __init__(self, link: Link, operation: int, tensor: torch.Tensor, what: str) -> None:
        self._link = link
        self._operation = operation  # 0 once it is done
        self._tensor = tensor  # whose memory is read or written until then
        self._what = what

    def wait(self) -> None:
        """Block until the message is through. Raise RuntimeError if it cannot be."""
        while self._operation:
            result = self._link.wait(self._operation, _PAUSE)
            if result:
                self._operation = 0
            if result < 0:
                raise RuntimeError(f"{self._what}: {os.strerror(-result)}")

    def __del__(self) -> None:
        if self._operation:
            self._link.keep(self._operation, self._tensor)


class Link:
    """This process's messages to and from the ranks whose memory it can read.

    Args:
        group: torch's group of all ranks. The constructor is collective.
    """

    def __init__(self, group: Any) -> None:
        found = library()
        assert found is not None
        self._native = found.handle
        rank, size = group.rank(), group.size()
        file, address = ctypes.c_int32(), ctypes.c_uint64()
        self._link = self._native.zeromesh_link_open(rank, size, ctypes.byref(file), ctypes.byref(address))
        self._dropped: list[tuple[int, torch.Tensor]] = []
        mine = (PLACE, os.getpid(), file.value, address.value) if self._link else None
        shown: list[Any] = [None] * size
        dist.all_gather_object(shown, mine, group=group)
        reached = {
            peer for peer, (place, process, number, at) in ((p, one) for p, one in enumerate(shown) if one and mine)
            if peer != rank and place == PLACE
            and self._native.zeromesh_link_join(self._link, peer, process, number, at) == 0
        }  # fmt: skip
        ready = bool(self._link) and self._native.zeromesh_link_start(self._link) == 0
        every: list[Any] = [None] * size
        dist.all_gather_object(every, reached if ready else set(), group=group)
        self.ranks = {peer for peer in every[rank] if rank in every[peer]}
        if self._link:
            weakref.finalize(self, self._native.zeromesh_link_close, self._link, LEAVING)

    def post(self, sends: bool, rank: int, key: int, tensor: torch.Tensor) -> Message:
        """Start to send a contiguous tensor to a rank of all, or to receive one; both sides give the same key."""
        self._dropped = [(one, kept) for one, kept in self._dropped if not self.wait(one, 0)]
        operation = self._native.zeromesh_link_post(self._link, sends, rank, key, tensor.data_ptr(), tensor.nbytes)
        if not operation:
            raise MemoryError("no memory for a message")
        return Message(self, operation, tensor, f"a message {'to' if sends else 'from'} rank {rank}")

    def wait(self, operation: int, milliseconds: int) -> int:
        """Return 1 if a message is through, 0 if it is not after some time, else a negative number of an error."""
        return int(self._native.zeromesh_link_wait(self._link, operation, milliseconds))

    def keep(self, operation: int, tensor: torch.Tensor) -> None:
        """Keep the memory of a message that nobody waits for until it is through."""
        self._dropped.append((operation, tensor))


class LocalGroup:
    """The ranks of a process group that are reached without a socket."""

    def __init__(self, link: Link, group: Any) -> None:
        self._link = link
        self._ranks = dist.get_process_group_ranks(group)
        # Groups have the same name on all ranks; messages of different groups must not be taken for each other.
        self._space = zlib.crc32(group.group_name.encode()) << 32
        self.peers = frozenset(place for place, rank in enumerate(self._ranks) if rank in link.ranks)

    def post(
        self, receives: Iterable[tuple[int, torch.Tensor]], sends: Iterable[tuple[int, torch.Tensor]], tag: int
    ) -> list[Message]:
        """Start messages from and to group ranks."""
        post, ranks, key = self._link.post, self._ranks, self._space | tag
        works = [post(False, ranks[peer], key, tensor) for peer, tensor in receives]
        return works + [post(True, ranks[peer], key, tensor) for peer, tensor in sends]


def local_group(group: Any) -> LocalGroup | None:
    """Return the ranks of a group that this one reaches without a socket; None if there are none.

    Collective over all ranks at the first call.
    """
    world = dist.group.WORLD
    if world not in _links:
        native = library()
        _links[world] = Link(world) if native is not None and hasattr(native.handle, "zeromesh_link_open") else None
    link = _links[world]
    found = LocalGroup(link, group) if link is not None else None
    return found if found is not None and found.peers else None
