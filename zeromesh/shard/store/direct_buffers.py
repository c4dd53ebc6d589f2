"""Buffers that direct I/O can use: memory that begins at a page, lent out from one budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol

import torch

from zeromesh.shard.store.swap_file import ALIGNMENT, aligned

# Makes host memory: from a number of bytes to a uint8 tensor of shape `(nbytes,)`.
Allocate = Callable[[int], torch.Tensor]


def host_memory(nbytes: int) -> torch.Tensor:
    """Uninitialized; page-locked where there is an accelerator, so that copies to it run while it computes."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.accelerator.is_available())


class Transfer(Protocol):
    """Transfer that may be under way with a buffer."""

    def done(self) -> bool:
        """Return whether it has ended, well or not."""

    def settle(self) -> None:
        """Wait until it has ended; raises what went wrong, unless it was raised before."""


class Buffer:
    """Host memory that begins at a page, in whole blocks."""

    def __init__(self, nbytes: int, allocate: Allocate = host_memory) -> None:
        self.nbytes = aligned(nbytes)
        memory = allocate(self.nbytes + ALIGNMENT)
        begin = -memory.data_ptr() % ALIGNMENT  # direct I/O refuses other addresses
        self.memory = memory[begin : begin + self.nbytes]
        self.view = self.memory.numpy().data
        self.transfer: Transfer | None = None  # what a store does with it, or did last

    def tensor(self, elements: int, dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
        """``elements`` of it from byte ``offset`` on, as ``(elements,)``: a view, which does not outlive the loan."""
        return self.memory[offset : offset + elements * dtype.itemsize].view(dtype)

    def begin(self, transfer: Transfer) -> None:
        """Note the transfer that a store does with it from here on."""
        self.transfer = transfer


class Buffers:
    """A pool of buffers, which is a budget: it does not grow."""

    def __init__(self, sizes: Iterable[int], allocate: Allocate = host_memory) -> None:
        self._free = sorted((Buffer(size, allocate) for size in sizes), key=lambda buffer: buffer.nbytes)
        self.nbytes = sum(buffer.nbytes for buffer in self._free)

    def take(self, nbytes: int) -> Buffer | None:
        """The smallest free buffer that holds ``nbytes``, or None."""
        for index, buffer in enumerate(self._free):
            if buffer.nbytes >= nbytes:
                return self._free.pop(index)
        return None

    def give_settled(self, buffer: Buffer) -> None:
        """Return a buffer once its transfer has ended, well or not."""
        if buffer.transfer is not None:
            with suppress(OSError, RuntimeError):  # whoever needs the bytes has waited, and has raised it
                buffer.transfer.settle()
        self.give(buffer)

    def give(self, buffer: Buffer) -> None:
        """Return a buffer; nothing may be under way with it."""
        assert buffer.transfer is None or buffer.transfer.done(), "a buffer came back while the disk uses it"
        assert buffer not in self._free, "a buffer came back twice"
        self._free.append(buffer)
        self._free.sort(key=lambda free: free.nbytes)
