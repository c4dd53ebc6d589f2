"""Sums, sums of squares and checksums on the host, at the speed of memory, whatever the number of threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from zeromesh.base.kernels.native import TYPES, library, threads_of

_CHECKED = 1 << 20  # bytes of one checksum: `BYTES` in native.c
_PRIME, _LEFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(29)
_SQUARED = 1 << 16  # elements of one sum of squares: `BLOCK` in native.c
_ROW = 1024  # elements whose squares torch sums in at least fp32; their sums are added up in float64

Numbers = np.ndarray[Any, np.dtype[np.uint64]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def _mix(sums: Numbers, words: Numbers) -> Numbers:
    product: Numbers = (sums ^ words) * _PRIME
    return (product << _LEFT) | (product >> np.uint64(64 - 29))


def checksums(data: Bytes) -> Numbers:
    """Return the checksum of each MiB, as ``zeromesh_checksum`` in native.c computes it."""
    end = len(data) // _CHECKED * _CHECKED
    blocks = (data[:end].reshape(-1, _CHECKED), data[None, end:])
    results = [np.empty(0, np.uint64)]
    for block in blocks:
        if not block.size:
            continue
        count, size = block.shape
        lanes = np.arange(9, dtype=np.uint64)
        seeds = _mix(np.full(9, size, dtype=np.uint64), lanes)
        sums = np.repeat(seeds[None, 1:], count, 0)
        padded = np.pad(block, ((0, 0), (0, -size % 64))).view(np.uint64).reshape(count, -1, 8)
        for words in padded.transpose(1, 0, 2):
            sums = _mix(sums, words)
        total = np.full(count, seeds[0])
        for lane in range(8):
            total = _mix(total, sums[:, lane])
        results.append(_mix(total, total >> np.uint64(32)))
    return np.concatenate(results)


def checksum(tensor: torch.Tensor, threads: int | None = None) -> int:
    """Return 64 bits from the bytes of a contiguous tensor on the CPU, by which one notices that they changed.

    It depends on where each byte is, and is the same on every machine of the same byte order, with the native library
    and without.

    Raises:
        ValueError: the tensor is not contiguous, or elsewhere.
    """
    # It is no cryptographic hash: whoever wants to can make other bytes with the same checksum.
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"a tensor on {tensor.device} with strides {tensor.stride()} is not contiguous on the CPU; copy it"
        )
    workers, native = threads_of(threads), library()
    data = tensor.detach().flatten().view(torch.uint8).numpy()
    size = data.nbytes
    while True:
        if native is None:
            sums = checksums(data)
        else:
            sums = np.empty(-(-data.nbytes // _CHECKED), np.uint64)
            native.handle.zeromesh_checksum(data.ctypes.data, data.nbytes, sums.ctypes.data, workers)
        if len(sums) <= 1:
            return int(sums[0]) if len(sums) else 0
        # The checksums of the blocks are summed in turn, with the size: else zeros of any length would be alike.
        data = np.append(sums, np.uint64(size)).view(np.uint8)


def add(target: torch.Tensor, values: torch.Tensor) -> None:
    """Add ``values`` to ``target``, of the same shape, in place.

    The bits are those of ``target.add_(values)``. torch takes five times as long for 16 bits that are added to 32 on
    the CPU.
    """
    widens = values.dtype in (torch.bfloat16, torch.float16) and target.dtype is torch.float32
    native = library() if widens and target.shape == values.shape and _lies(target) and _lies(values) else None
    if native is None or target.is_inference():
        target.add_(values)
        return
    native.handle.zeromesh_add(
        native.choose(None),
        values.data_ptr(),
        TYPES[values.dtype],
        target.data_ptr(),
        TYPES[target.dtype],
        target.numel(),
        threads_of(None),
    )
    torch.autograd.graph.increment_version(target)


def _lies(tensor: torch.Tensor) -> bool:
    """Return whether the memory of a tensor, on the CPU, is its value: no fake one, sign to be read, or zeros."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return plain and tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg() and not tensor._is_zerotensor()


def sum_of_squares(values: torch.Tensor, threads: int | None = None, instructions: str | None = None) -> torch.Tensor:
    """Return the sum of squares of a 1-D tensor: float64, shape (), on its device.

    On the CPU, the native library adds the squares of 16- and 32-bit numbers in float64. It gives the same bits with
    every number of threads and instruction set. Elsewhere fp32 numbers beyond 1e19 have infinite squares.
    """
    native = library() if values.dtype in TYPES and _lies(values) else None
    if native is not None:
        sums = np.empty(-(-values.numel() // _SQUARED), np.float64)
        native.handle.zeromesh_squares(
            native.choose(instructions),
            values.data_ptr(),
            TYPES[values.dtype],
            values.numel(),
            sums.ctypes.data,
            threads_of(threads),
        )
        return torch.tensor(sums.sum(), dtype=torch.float64, device=values.device)
    # Row by row, because an fp32 sum over ten million elements is wrong in the fourth digit on a CPU, and in at least
    # fp32, because a norm may be beyond the range of 16 bits when no element is.
    wide = torch.promote_types(values.dtype, torch.float32)
    end = values.numel() // _ROW * _ROW
    norms = torch.linalg.vector_norm(values[:end].view(-1, _ROW), dim=1, dtype=wide)
    rest = torch.linalg.vector_norm(values[end:], dtype=wide)
    total: torch.Tensor = norms.double().square().sum() + rest.double().square()
    return total
