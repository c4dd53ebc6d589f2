"""Copies between a device and host memory that run beside what the device computes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class CopyStreams:
    """Streams that copies run on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # One for each direction: a copy waits neither for what is computed meanwhile nor for copies the other way.
        self.to_host: Any = torch.Stream(device)
        self.to_device: Any = torch.Stream(device)

    def current(self) -> Any:
        """The stream of this thread that computes."""
        return torch.accelerator.current_stream(self._device)

    def copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        """Launch a copy."""
        with stream:
            target.copy_(source, non_blocking=True)  # otherwise a copy from the device, too, blocks the host


class Copy:
    """A copy that was begun. It keeps the memory of both tensors until it is waited for."""

    # Whoever reads the target, or writes to the source or the target, waits: the host by `wait`, what the current
    # stream is given next by `order`, a collective by being begun in `Link.behind`. Memory is given up, be it a slot, a
    # storage that `resize_` empties or a tensor that is dropped, after `order` (on the device) or `wait` (on the host):
    # who gets it next is behind the current stream. `record_stream` would tell the allocator only, which knows nothing
    # of slots.

    def __init__(self, streams: CopyStreams | None = None, event: Any = None, *memory: torch.Tensor) -> None:
        self._streams = streams
        self._event = event
        self._memory = memory

    def wait(self) -> None:
        """Block the host until the copy has run. Any thread may call it, and again."""
        if self._event is not None:
            self._event.synchronize()
            self._memory = ()

    def order(self) -> None:
        """Let what the current stream is given from here on wait for the copy; the host goes on."""
        if self._streams is not None:
            self._streams.current().wait_event(self._event)
            self._memory = ()

    def precede(self, stream: Any) -> None:
        """Let what another stream is given from here on wait for the copy."""
        if self._event is not None:
            stream.wait_event(self._event)


DONE = Copy()  # where the device is the host, a copy is made at once, and there is nothing to wait for


class Link:
    """Between a device and the host's memory."""

    def __init__(self, device: torch.device, streams: CopyStreams | None = None) -> None:
        self._streams = CopyStreams(device) if streams is None and device.type != "cpu" else streams
        self.moved = 0  # bytes that were copied so far

    @property
    def apart(self) -> bool:
        """True if the device's memory is not the host's, so that copies take their time."""
        return self._streams is not None

    def count(self, nbytes: int) -> None:
        """Count bytes that are used where they lie, because the device is the host."""
        self.moved += nbytes

    def to_host(self, target: torch.Tensor, source: torch.Tensor, after: Copy = DONE) -> Copy:
        """Begin to copy from the device to the host; to pageable memory it blocks."""
        return self._begin(None if self._streams is None else self._streams.to_host, target, source, after)

    def to_device(self, target: torch.Tensor, source: torch.Tensor, after: Copy = DONE) -> Copy:
        """Begin to copy from the host to the device; from pageable memory it may block."""
        return self._begin(None if self._streams is None else self._streams.to_device, target, source, after)

    def _begin(self, stream: Any, target: torch.Tensor, source: torch.Tensor, after: Copy) -> Copy:
        self.moved += source.nbytes
        if self._streams is None:
            target.copy_(source)
            return DONE
        # The stream of the copy waits for the current stream: the source has been written then, and nobody reads what
        # the target held before, as the parameters of a unit that had the slot.
        stream.wait_event(self._streams.current().record_event())
        after.precede(stream)  # a copy that may be on the other stream
        self._streams.copy(stream, target, source)
        return Copy(self._streams, stream.record_event(), target, source)

    def behind(self) -> AbstractContextManager[Any]:
        """Begin collectives in this context that wait for all copies to the device so far."""
        # The stream of these copies is the current one in it, so that what is computed waits for neither.
        return nullcontext() if self._streams is None else self._streams.to_device

    def synchronize(self) -> None:
        """Block the host until every copy has run."""
        if self._streams is not None:
            self._streams.to_host.synchronize()
            self._streams.to_device.synchronize()
