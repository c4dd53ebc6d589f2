"""Checksums on the host, at the speed of memory; they do not depend on the number of threads."""

from __future__ import annotations

import numpy as np
import torch

from zeromesh.kernels import fallback
from zeromesh.kernels.native import library, threads_of

_CHECKED = 1 << 20  # bytes of one checksum: `BYTES` in native.c


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
            sums = fallback.checksums(data)
        else:
            sums = np.empty(-(-data.nbytes // _CHECKED), np.uint64)
            native.handle.zeromesh_checksum(data.ctypes.data, data.nbytes, sums.ctypes.data, workers)
        if len(sums) <= 1:
            return int(sums[0]) if len(sums) else 0
        # The checksums of the blocks are summed in turn, with the size: else zeros of any length would be alike.
        data = np.append(sums, np.uint64(size)).view(np.uint8)
