"""Sums and checksums on the host, at the speed of memory; their results do not depend on the number of threads."""

from __future__ import annotations

import math

import numpy as np
import torch

from zeromesh.kernels import fallback
from zeromesh.kernels.native import TYPES, check, library, threads_of
from zeromesh.kernels.update import UpdatePiece, UpdateStep, update

_SUMMED = 65536  # elements of one sum, and bytes of one checksum: `BLOCK` and `BYTES` in native.c
_CHECKED = 1 << 20

# Settings of SGD with which a step adds the gradient.
_ADD = UpdateStep("sgd", {"lr": -1.0, "weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, "nesterov": False}, 1)


def sum_of_squares(tensor: torch.Tensor, threads: int | None = None, instructions: str | None = None) -> float:
    """The sum of the squares of a 1-D contiguous tensor on the CPU (fp32, bf16 or fp16), added in float64.

    Raises:
        ValueError: it is another kind of tensor, or the processor lacks the instruction set.
    """
    check("tensor", tensor, tensor.numel(), tuple(TYPES))
    workers, native = threads_of(threads), library()
    if native is None:
        return fallback.sum_of_squares(tensor)
    sums = np.empty(-(-tensor.numel() // _SUMMED))
    native.handle.zeromesh_squares(
        native.choose(instructions), tensor.data_ptr(), TYPES[tensor.dtype], tensor.numel(), sums.ctypes.data, workers
    )
    return math.fsum(sums)


def accumulate(target: torch.Tensor, source: torch.Tensor, threads: int | None = None) -> None:
    """Add to ``target`` (fp32) what is in ``source`` (fp32, bf16 or fp16): 1-D contiguous tensors on the CPU."""
    update([UpdatePiece(_ADD, source, target, ())], threads=threads)


def checksum(tensor: torch.Tensor, threads: int | None = None) -> int:
    """A number of 64 bits from the bytes of a contiguous tensor on the CPU, by which one notices that they changed.

    It depends on where each byte is, and is the same on every machine of the same byte order, with the native library
    and without. It is no cryptographic hash: whoever wants to can make other bytes with the same checksum.

    Raises:
        ValueError: the tensor is not contiguous, or elsewhere.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"a tensor on {tensor.device} with strides {tensor.stride()} is not contiguous on the CPU; copy it"
        )
    workers = threads_of(threads)
    data = tensor.detach().flatten().view(torch.uint8).numpy()
    size = data.nbytes
    while True:
        sums = _checksums(data, workers)
        if len(sums) <= 1:
            return int(sums[0]) if len(sums) else 0
        data = np.append(sums, np.uint64(size)).view(np.uint8)


def _checksums(data: fallback.Bytes, threads: int) -> fallback.Numbers:
    """Return the checksum of each block of the bytes."""
    native = library()
    if native is None:
        return fallback.checksums(data)
    sums = np.empty(-(-data.nbytes // _CHECKED), np.uint64)
    native.handle.zeromesh_checksum(data.ctypes.data, data.nbytes, sums.ctypes.data, threads)
    return sums
