"""Peak rates of the machine."""

from __future__ import annotations

import math
import time

import torch

DENSE_16BIT_FLOPS: dict[str, float] = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
    "V100": 125e12,
    "T4": 65e12,
}
"""Operations per second of 16-bit matrix products without sparsity, from the makers' data sheets, by a part of the
device's name; the first that fits counts."""


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second that this process can at best do in matrix products: from a table, else measured."""
    if device.type == "cuda" and dtype.itemsize == 2:
        name = torch.cuda.get_device_name(device)
        for part, flops in DENSE_16BIT_FLOPS.items():
            if part in name:
                return flops
    return measured_flops(device, dtype)


BURSTS = 5
PAUSE_SECONDS = 0.1


def measured_flops(device: torch.device, dtype: torch.dtype, seconds: float = 0.5) -> float:
    """Operations per second of the best among products of square matrices that are repeated for ``seconds``.

    On a CPU a product takes a few milliseconds, and they come in bursts with pauses in between, so that one of them is
    likely to run undisturbed on a busy machine. It need not: a run may turn out to be faster.
    """
    size = 512 * math.isqrt(torch.get_num_threads()) if device.type == "cpu" else 8192
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    matrix @ matrix  # the first use of a library takes longer
    best = float("inf")
    for burst in range(BURSTS):
        if burst:
            time.sleep(PAUSE_SECONDS)
        end = time.perf_counter() + seconds / BURSTS
        while time.perf_counter() < end:
            _synchronize(device)
            start = time.perf_counter()
            matrix @ matrix
            _synchronize(device)
            best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
