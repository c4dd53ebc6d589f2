"""Measured bandwidth of a disk."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from zeromesh.tiers.buffers import Buffer
from zeromesh.tiers.nvme import MIB, FileStore


@dataclass(frozen=True)
class Bandwidth:
    """Bandwidth of a folder's disk.

    Attributes:
        read, write: bytes per second, one direction at a time, in order.
        direct: whether that passes by the page cache; else it may be the memory's.
    """

    read: float
    write: float
    direct: bool


def measure_bandwidth(folder: str | Path, nbytes: int = 128 * MIB, queue_depth: int = 8) -> Bandwidth:
    """Write ``nbytes`` to a folder twice and read them once, as a ``FileStore`` does it, with checksums.

    The first write is not counted: it is slower where the file system notes that the space now holds something. A disk
    with a cache of its own, or one that may be quick for a while only, is slower in the long run.

    Raises:
        OSError: the folder cannot be used, or has too little space.
    """
    with FileStore(folder, queue_depth=queue_depth) as store:
        region = store.allocate(nbytes)
        store.reserve()
        buffer = Buffer(nbytes)
        part = buffer.memory[:MIB].random_()  # zeros could be left out by the disk
        for begin in range(MIB, buffer.nbytes, MIB):
            buffer.memory[begin : begin + MIB] = part[: buffer.nbytes - begin]
        store.write(region, buffer).wait()
        start = time.perf_counter()
        store.write(region, buffer).wait()
        middle = time.perf_counter()
        store.read(region, buffer).wait()
        end = time.perf_counter()
        return Bandwidth(region.padded / (end - middle), region.padded / (middle - start), store.direct)
