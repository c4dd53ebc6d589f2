"""Measured memory of the process: the device's allocator, or resident memory on a CPU."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch


def live_bytes(device: torch.device) -> int:
    """Bytes in use now: tensors on an accelerator; on a CPU the resident memory of the process."""
    if device.type != "cpu":
        return int(torch.accelerator.memory_allocated(device))
    statm = Path("/proc/self/statm")
    if statm.is_file():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return peak_bytes(device)


def peak_bytes(device: torch.device) -> int:
    """The most bytes that have been in use, in the same sense, since the process started."""
    if device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
