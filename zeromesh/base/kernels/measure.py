"""Speed of a device: seconds of work on it, copies of its memory, and products of matrices."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

TRIES = 5
BURSTS = 5
PAUSE_SECONDS = 0.1


def synchronize(device: torch.device) -> None:
    """Wait for all that an accelerator has been given to do."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int = 1) -> float:
    """Return the seconds of a piece of work; of several, whose launches overlap with kernels, the mean."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    synchronize(device)
    return (time.perf_counter() - start) / repeats


def best_seconds(work: Callable[[], object], device: torch.device, tries: int = TRIES) -> float:
    """Return the least seconds of several tries, without the first, in which libraries and memory are prepared."""
    work()
    return min(seconds_of(work, device) for _ in range(tries))


def copy_speed(device: torch.device, nbytes: int, tries: int = TRIES) -> float:
    """Return the bytes per second that copies of so many bytes read and write."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * nbytes / best_seconds(lambda: target.copy_(source), device, tries)


def product_speed(device: torch.device, dtype: torch.dtype, seconds: float = 0.5) -> float:
    """Return the operations per second of the best of products of square matrices, repeated for ``seconds``."""
    # On a CPU a product takes a few milliseconds, and they come in bursts with pauses in between, so that one of them
    # is likely to run undisturbed on a busy machine. It need not: a run may turn out to be faster.
    size = 512 * math.isqrt(torch.get_num_threads()) if device.type == "cpu" else 8192
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    best = best_seconds(lambda: matrix @ matrix, device, tries=1)
    for burst in range(BURSTS):
        if burst:
            time.sleep(PAUSE_SECONDS)
        end = time.perf_counter() + seconds / BURSTS
        while time.perf_counter() < end:
            best = min(best, seconds_of(lambda: matrix @ matrix, device))
    return 2.0 * size**3 / best
