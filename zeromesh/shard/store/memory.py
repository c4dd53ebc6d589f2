"""Memory for states that rest on the device or on the host."""

# On a machine without an accelerator the host's memory is a store of its own all the same: what rests there is copied
# to be computed with, so that what is tested there is what runs elsewhere.

from __future__ import annotations

import ctypes
import mmap
import sys
import weakref

import torch

from zeromesh.base.placement import Tier
from zeromesh.shard.store.link import DONE, Copy, Link

_HUGE = 2 << 20
_MADV_HUGEPAGE = 14


def allocate(nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """Uninitialized memory; in huge pages where the kernel has them to give (Linux), which are quicker to come by."""
    storage = torch.UntypedStorage(nbytes, device=device)
    if device.type == "cpu" and sys.platform == "linux" and nbytes >= 2 * _HUGE:
        first = -(-storage.data_ptr() // _HUGE) * _HUGE
        length = (storage.data_ptr() + nbytes - first) // _HUGE * _HUGE
        # Advice only: where it is not heeded, nothing is lost.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _MADV_HUGEPAGE)
    return storage


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
