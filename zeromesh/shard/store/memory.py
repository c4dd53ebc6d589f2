"""Memory for states that rest on the device or on the host."""

# On a machine without an accelerator the host's memory is a store of its own all the same: what rests there is copied
# to be computed with, so that what is tested there is what runs elsewhere.

from __future__ import annotations

import ctypes
import mmap
import sys
import weakref
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch

from zeromesh.base.placement import Tier
from zeromesh.shard.store.link import DONE, Copy, Link
from zeromesh.shard.store.swap_file import ALIGNMENT, DiskTraffic, aligned

_HUGE = 2 << 20
_MADV_WILLNEED, _MADV_HUGEPAGE = 3, 14


def allocate(nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """Uninitialized memory; in huge pages where the kernel has them to give (Linux), which are quicker to come by."""
    storage = torch.UntypedStorage(nbytes, device=device)
    if device.type == "cpu" and sys.platform == "linux" and nbytes >= 2 * _HUGE:
        first = -(-storage.data_ptr() // _HUGE) * _HUGE
        length = (storage.data_ptr() + nbytes - first) // _HUGE * _HUGE
        _advise(first, length, _MADV_HUGEPAGE)
    return storage


def read_ahead(tensors: Iterable[torch.Tensor]) -> None:
    """Let the kernel begin to read contiguous tensors in memory mapped from files, all of them at once (Linux)."""
    for tensor in tensors if sys.platform == "linux" else ():
        first = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        _advise(first, tensor.data_ptr() + tensor.nbytes - first, _MADV_WILLNEED)


def _advise(first: int, length: int, advice: int) -> None:
    """Give the kernel advice about memory; where it is not heeded, nothing is lost."""
    ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), advice)


def empty(elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an uninitialized tensor of shape ``(elements,)`` in memory from ``allocate``."""
    return torch.empty(0, dtype=dtype, device=device).set_(
        allocate(elements * dtype.itemsize, device), 0, (elements,), (1,)
    )


def empty_on(tier: Tier, elements: int, dtype: torch.dtype, device: torch.device, pin: bool = True) -> torch.Tensor:
    """Return an uninitialized tensor on a tier of a process that computes on ``device``; see ``empty``.

    Raises:
        RuntimeError: it cannot be page-locked.
    """
    tensor = empty(elements, dtype, device if tier is Tier.DEVICE else torch.device("cpu"))
    # Page-locked, so that copies run while the device computes. Not by torch's own allocator for this, which takes up
    # to twice as much, as it rounds up to powers of two.
    if pin and device.type == "cuda" and tensor.device.type == "cpu" and tensor.nbytes:
        # Large memory is written to once by torch's threads: the driver would make the pages one after the other.
        tensor.view(torch.uint8)[:: mmap.PAGESIZE].zero_()
        lock_pages(tensor.untyped_storage())
    return tensor


def zeros_on(tier: Tier, elements: int, dtype: torch.dtype, device: torch.device, pin: bool = True) -> torch.Tensor:
    """Return a tensor of zeros on a tier; see ``empty_on``."""
    return empty_on(tier, elements, dtype, device, pin).zero_()


class Staging:
    """Host memory in which new parameters are put together on their way to the device."""

    def __init__(self, link: Link, pin: bool = True) -> None:
        self._link = link
        self._pin = pin
        self._buffers: list[tuple[torch.Tensor, Copy]] = []

    def take(self, target: torch.Tensor, tier: Tier) -> torch.Tensor:
        """Memory on the host for what goes to ``target``, which rests on ``tier``; of its shape, 1-D, and dtype."""
        if tier is not Tier.DEVICE or not self._link.apart:
            return target
        # Of two buffers, the one whose copy was begun first. The host waits for that copy, on the stream to the device,
        # before it writes to the buffer again.
        memory, copied = self._buffers.pop(0) if len(self._buffers) > 1 else (torch.empty(0, dtype=torch.uint8), DONE)
        copied.wait()
        if memory.nbytes < target.nbytes:
            memory = empty_on(Tier.HOST, target.nbytes, torch.uint8, target.device, self._pin)
        self._buffers.append((memory, DONE))
        return memory[: target.nbytes].view(target.dtype)

    def send(self, staged: torch.Tensor, target: torch.Tensor) -> Copy:
        """Begin to copy what was put together to ``target``, which is not to be used before it is there."""
        if staged is target:
            return DONE
        copy = self._link.to_device(target, staged)
        self._buffers[-1] = self._buffers[-1][0], copy
        return copy


def lock_pages(storage: torch.UntypedStorage) -> None:
    """Page-lock host memory until it is freed; raise RuntimeError if that cannot be."""
    runtime, address = torch.cuda.cudart(), storage.data_ptr()
    error = int(runtime.cudaHostRegister(address, storage.nbytes(), 0))
    if error != 0:
        raise RuntimeError(
            f"{storage.nbytes():,} bytes of host memory could not be page-locked (CUDA error {error}); set "
            "pin_memory to false for what is offloaded, or allow more with `ulimit -l`"
        )
    weakref.finalize(storage, runtime.cudaHostUnregister, address)


def unloaded(like: torch.Tensor) -> torch.Tensor:
    """NaN (of whole numbers: 0) of the same shape and dtype, in the memory of one number; nobody can write to it."""
    # NaN rather than no elements: code that looks at shapes goes on, and whoever computes with it notices. As the
    # negative of NaN, of which torch gives no numpy array, which could be written to.
    tensor = torch.full((), torch.nan if _has_nan(like) else 0, dtype=like.dtype).expand(like.shape)
    tensor = torch._neg_view(tensor) if _has_nan(like) else tensor
    setattr(tensor, _UNLOADED, True)
    return tensor


def is_unloaded(value: torch.Tensor) -> bool:
    """Return whether it is from ``unloaded``; raise RuntimeError if somebody has written to it through a view."""
    if not hasattr(value, _UNLOADED):
        return False
    if _has_nan(value) and value.numel() and not bool(value.as_strided((), ()).isnan()):
        raise RuntimeError(
            f"a master or an optimizer state of shape {tuple(value.shape)} that rests on NVMe or in halves was written "
            "to through a view of it, and what was written is lost: between updates its tensor holds no values; set it "
            "by safe_set_full_optimizer_state or safe_set_full_fp32_param, or assign optimizer.state[piece][name]"
        )
    return True


def _has_nan(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


_UNLOADED = "_rests_elsewhere"


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


class MemoryBlocks:
    """Blocks of bytes by key in host memory, which are zeros at first; and what stores of other tiers do, too.

    The memory of a block, uint8 and 1-D, is lent until it is given back. ``Swap`` puts masters and optimizer states
    into blocks, in windows, and ``Stored`` parameters. Masters in halves are the form of a block, and updates during
    the backward are provisional writes: both work over any store.
    """

    in_memory = True  # blocks count in host memory, and are changed in place, never provisionally
    folder: Path | None = None  # of files
    host_bytes = 0  # of the buffers that blocks are lent in

    def __init__(
        self,
        sizes: Mapping[Hashable, int],
        allocate: Allocate,
        disk: object,
        rank: int,
        spares: Collection[Hashable] = (),  # keys of which two versions are there at a time
    ) -> None:
        self._blocks = {key: allocate(size).zero_() for key, size in sizes.items()}
        self.nbytes = sum(sizes.values())

    @staticmethod
    def buffer_sizes(sizes: Iterable[int], disk: object) -> list[int]:
        """Return the sizes of the buffers for blocks of these sizes: none, as blocks are used where they rest."""
        return []

    def take(self, key: Hashable, read: bool) -> torch.Tensor:
        """Return a block's memory, with its contents if ``read``."""
        return self._blocks[key]

    def changed(self, key: Hashable) -> bool:
        """Return whether the memory of a block that was taken has to be written, by what it holds."""
        return False

    def give(self, key: Hashable, write: bool, behind: bool = False) -> None:
        """Return a block; with ``write`` it holds something else now. ``behind``: it is written some time later."""

    def read_ahead(self, keys: Iterable[Hashable]) -> None:
        """Begin to read the blocks that are taken next, in order."""

    def stream(self, keys: Sequence[Hashable], write: bool, provisional: bool = False) -> Generator[torch.Tensor]:
        """Yield blocks in order, each until the next one is asked for; what is ``provisional`` awaits ``commit``."""
        assert not provisional
        yield from (self._blocks[key] for key in keys)

    def traffic(self) -> DiskTraffic | None:
        """Return the traffic of the disk so far; None where there is none."""
        return None

    def close(self) -> None:
        """Give all blocks up; ``commit`` and ``drop`` let what was written provisionally count, or forget it."""

    commit = drop = close
