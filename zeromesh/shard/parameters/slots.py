"""Slots: full-size working buffers that are lent out from pools, which are budgets."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from operator import attrgetter

import torch

from zeromesh.shard.store.memory import allocate

# Since torch 2.13 memory moves from one storage to another. Before, a lent slot is only a right to allocate.
CAN_SWAP = hasattr(torch.UntypedStorage, "_swap_data_ptr_")


class Slot:
    """One buffer of ``nbytes`` bytes; with ``lent`` it goes into other storages and is empty where that is no move."""

    def __init__(self, nbytes: int, device: torch.device, lent: bool, extra: bool = False) -> None:
        self.nbytes = nbytes
        self.extra = extra
        self._lent = lent
        self.storage = torch.UntypedStorage(0, device=device)

    def fill(self) -> Slot:
        """Allocate the memory."""
        # From the first loan on it is kept, so that training neither fragments memory nor pays for page faults.
        if self.storage.nbytes() == 0 and (CAN_SWAP or not self._lent):
            self.storage = allocate(self.nbytes, self.storage.device)
        return self

    def empty(self) -> None:
        """Give the memory back."""
        # Not the storage's own: somebody may still refer to a tensor in it.
        self.storage = torch.UntypedStorage(0, device=self.storage.device)

    def tensor(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """The first ``elements`` of it, 1-D. A view: it does not outlive the loan."""
        return torch.empty(0, dtype=dtype, device=self.storage.device).set_(self.storage, 0, (elements,), (1,))


class Pool:
    """Slots of given sizes."""

    def __init__(self, sizes: Iterable[int], device: torch.device, lent: bool = False) -> None:
        self._device = device  # where they lie
        # Whether the memory goes into the units' storages (parameters) or is used where it is (gradients).
        self._lent = lent
        self._free = sorted((Slot(size, device, lent) for size in sizes if size > 0), key=lambda slot: slot.nbytes)
        self.nbytes = sum(slot.nbytes for slot in self._free)

    def take(self, nbytes: int) -> Slot | None:
        """The smallest free slot that holds ``nbytes``, or None."""
        index = bisect_left(self._free, nbytes, key=attrgetter("nbytes"))
        return self._free.pop(index).fill() if index < len(self._free) else None

    def grow(self, nbytes: int) -> Slot:
        """A new slot beyond the budget."""
        # Rather than a deadlock. It is counted and used again until `shrink`: somebody has many whole parameters at
        # once.
        self.nbytes += nbytes
        return Slot(nbytes, self._device, self._lent, extra=True).fill()

    def shrink(self) -> None:
        """Free the slots beyond the budget that are not in use."""
        self.nbytes -= sum(slot.nbytes for slot in self._free if slot.extra)
        self._free = [slot for slot in self._free if not slot.extra]

    def trim(self) -> None:
        """Give back the memory of the slots that are not in use; they stay in the budget."""
        for slot in self._free:
            slot.empty()

    def give(self, slot: Slot) -> None:
        """Return a slot."""
        # On CUDA its next writer is launched behind its last reader on the current stream, or is a collective or a
        # copy, whose stream waits for the current one when it is begun. Who gives it back has made the current stream
        # wait for all other streams that use it.
        insort(self._free, slot, key=attrgetter("nbytes"))


def largest(sizes: Iterable[int], count: int) -> list[int]:
    """The ``count`` largest sizes: slots in which ``count`` units fit at once, whichever they are."""
    return sorted(sizes, reverse=True)[:count]


def attach(storage: torch.UntypedStorage, slot: Slot) -> None:
    """Put the slot's memory into ``storage``, which is empty."""
    if CAN_SWAP:
        storage._swap_data_ptr_(slot.storage)  # type: ignore[attr-defined]
    else:
        storage.resize_(slot.nbytes)


def detach(storage: torch.UntypedStorage, slot: Slot) -> None:
    """Take the slot's memory out of ``storage`` again."""
    if CAN_SWAP:
        storage._swap_data_ptr_(slot.storage)  # type: ignore[attr-defined]
    else:
        storage.resize_(0)
