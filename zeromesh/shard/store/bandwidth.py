"""Measured bandwidth of a disk."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from zeromesh.shard.store.memory import Buffer
from zeromesh.shard.store.nvme import MIB, FileStore


@dataclass(frozen=True)
class Bandwidth:
    """Bandwidth of a folder's disk."""

    read: float  # bytes per second, one direction at a time, in order
    write: float
    direct: bool  # past the page cache; else it may be the memory's bandwidth


def measure_bandwidth(folder: str | Path, nbytes: int = 128 * MIB, queue_depth: int = 8) -> Bandwidth:
    """Write ``nbytes`` to a folder twice and read them once, as a ``FileStore`` does it, with checksums."""
    with FileStore(folder, queue_depth=queue_depth) as store:
        region = store.allocate(nbytes)
        store.reserve()
        buffer = Buffer(nbytes)
        part = buffer.memory[:MIB].random_()  # zeros could be left out by the disk
        for begin in range(MIB, buffer.nbytes, MIB):
            buffer.memory[begin : begin + MIB] = part[: buffer.nbytes - begin]
        # Not counted: the first write is slower where the file system notes that the space now holds something.
        store.write(region, buffer).wait()
        start = time.perf_counter()
        store.write(region, buffer).wait()
        middle = time.perf_counter()
        store.read(region, buffer).wait()
        end = time.perf_counter()
        return Bandwidth(region.padded / (end - middle), region.padded / (middle - start), store.direct)
