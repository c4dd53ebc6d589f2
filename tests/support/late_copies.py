"""A device beside the host, simulated on the CPU, whose copies run as late as they may.

What is computed runs at once, as ever. A copy is put off until something waits for it: the host, the stream that
computes, or a collective that is begun on the copies' stream. Until then its target holds NaN, and memory that moves
or goes before it has run is an error. What a stream waits for the host does not know: on the host the target holds NaN,
and the source is not to be written to, until the host waits itself. So whoever does not wait computes with other
numbers, or is told.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from zeromesh.shard.store.link import CopyStreams


class LateEvent:
    """The place in a stream's queue behind what it was given so far."""

    def __init__(self, stream: LateStream) -> None:
        self.stream, self.place = stream, stream.given

    def synchronize(self) -> None:
        self.stream.run(self.place)
        self.stream.tell(self.place)


class LateStream:
    """Runs what it was given, in order, when that is waited for; the stream that computes has nothing to put off.

    Attributes:
        given, ran: how many actions.
        fresh: whether it waits for the stream that computes and was given nothing since.
        untold: what the host does not know of what ran, with its place in the queue.
    """

    def __init__(self) -> None:
        self.queue: list[Callable[[], None]] = []
        self.untold: list[tuple[int, Callable[[], None]]] = []
        self.given = self.ran = 0
        self.fresh = False
        self.computes = False
        self.lock = threading.RLock()

    def give(self, action: Callable[[], None]) -> None:
        with self.lock:
            self.queue.append(action)
            self.given += 1

    def run(self, until: int) -> None:
        with self.lock:  # updates that begin early wait in a thread of their own
            while self.ran < until:
                self.ran += 1
                self.queue.pop(0)()

    def tell(self, until: int) -> None:
        with self.lock:
            while self.untold and self.untold[0][0] <= until:
                self.untold.pop(0)[1]()

    def record_event(self) -> LateEvent:
        return LateEvent(self)

    def wait_event(self, event: LateEvent) -> None:
        self.fresh = self.fresh or event.stream.computes
        if self.computes:
            event.stream.run(event.place)
        else:
            event.synchronize()  # earlier than it must: what it copies is there for the copy that comes next

    def synchronize(self) -> None:
        self.run(self.given)
        self.tell(self.given)

    def __enter__(self) -> None:
        if dist.get_world_size() > 1:
            self.run(self.given)  # a collective that is begun in here is behind what it was given

    def __exit__(self, *error: object) -> None:
        pass


class LateStreams(CopyStreams):
    """What a link runs copies on.

    Attributes:
        copies: how many were begun.
    """

    def __init__(self) -> None:
        self.to_host, self.to_device, self.computing = LateStream(), LateStream(), LateStream()
        self.computing.computes = True
        self.copies = 0

    def current(self) -> Any:
        return self.computing

    def copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        assert stream.fresh, "a copy does not wait for what was computed before"
        assert target.numel() == source.numel(), "a copy goes to another size"
        stream.fresh = False
        self.copies += 1
        target, source = target.detach(), source.detach()
        places = target.data_ptr(), source.data_ptr()
        if target.is_floating_point():
            target.fill_(torch.nan)

        def run() -> None:
            assert there(target) == places[0], "the memory that a copy goes to was given up before it ran"
            assert there(source) == places[1], "the memory that is copied was given up before the copy ran"
            value = source.clone()
            if stream is self.to_host:
                stream.untold.append((stream.ran, lambda: target.copy_(value)))
            else:
                target.copy_(value)
                stream.untold.append((stream.ran, lambda: unchanged(source, value)))

        stream.give(run)


def there(tensor: torch.Tensor) -> int | None:
    """Where it lies, if its memory is still there."""
    end = (tensor.storage_offset() + tensor.numel()) * tensor.itemsize
    return tensor.data_ptr() if tensor.untyped_storage().nbytes() >= end else None


def unchanged(source: torch.Tensor, value: torch.Tensor) -> None:
    """Require that the host has not written to what was copied."""
    same = torch.equal(source.view(torch.uint8), value.view(torch.uint8))
    assert same, "the host wrote to memory before it knew that it was copied"
