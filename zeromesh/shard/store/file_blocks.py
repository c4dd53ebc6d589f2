"""Blocks of bytes in a file: read ahead, written behind, and streamed.

Source: Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning", 2021.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Generator, Hashable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from zeromesh.base.spans import span
from zeromesh.shard.parameters.slots import largest
from zeromesh.shard.store.memory import Allocate, Buffer, Buffers
from zeromesh.shard.store.nvme import MIB, Disk, FileStore, PendingRequest, Region
from zeromesh.shard.store.swap_file import aligned


class FileBlocks:
    """Blocks as ``MemoryBlocks``, in a swap file of this process; all of it raises OSError if the disk fails."""

    in_memory = False

    def __init__(
        self,
        sizes: Mapping[Hashable, int],
        allocate: Allocate,
        disk: Disk,
        rank: int,
        spares: Collection[Hashable] = (),
    ) -> None:
        self._store = store = FileStore(disk.folder, rank, disk.block_size, disk.queue_depth)
        self._regions: dict[Hashable, Region] = {key: store.allocate(size) for key, size in sizes.items()}
        for key in spares:
            store.allocate_spare(sizes[key])
        try:
            store.reserve()
            self._pool = Buffers(self.buffer_sizes(sizes.values(), disk), allocate)
        except BaseException:
            store.close()
            raise
        self._most_reading = disk.buffers - 1  # one buffer is left for what was not foreseen
        self._lent: dict[Hashable, Buffer] = {}
        self._reading: dict[Hashable, tuple[Buffer, PendingRequest]] = {}
        self._behind: deque[tuple[Buffer, PendingRequest]] = deque()
        self.nbytes, self.host_bytes, self.folder = store.nbytes, self._pool.nbytes, store.path.parent
        self.commit, self.drop, self.traffic, self.close = store.commit, store.drop, store.traffic, store.close

    @staticmethod
    def buffer_sizes(sizes: Iterable[int], disk: Disk | None) -> list[int]:
        """Return the size of each buffer in host memory, so that the largest blocks fit at once."""
        assert disk is not None
        return largest(map(aligned, sizes), disk.buffers)

    def take(self, key: Hashable, read: bool) -> torch.Tensor:
        """Return a block's memory, with its contents if ``read``; waits for the read that was begun ahead."""
        region = self._regions[key]
        if not read:
            self._forget(key)
        buffer, pending = self._reading.pop(key, (None, None))
        buffer = buffer or self._free(region)
        try:
            if read:
                with span("wait_disk"):
                    (pending or self._store.read(region, buffer)).wait()
        except BaseException:
            self._pool.give_settled(buffer)
            raise
        self._lent[key] = buffer
        return buffer.memory[: region.padded]

    def changed(self, key: Hashable) -> bool:
        """Return whether the memory of a block that was taken holds something else than the file."""
        return not self._store.holds(self._regions[key], self._lent[key])

    def give(self, key: Hashable, write: bool, behind: bool = False) -> None:
        """Return a block; with ``write`` it holds something else now, which is on the disk then, or some time later."""
        buffer = self._lent.pop(key)
        try:
            if write:
                pending = self._store.write(self._regions[key], buffer)
                if behind:
                    self._behind.append((buffer, pending))
                    return
                pending.wait()
        except BaseException:
            self._pool.give_settled(buffer)
            raise
        self._pool.give(buffer)

    def read_ahead(self, keys: Iterable[Hashable]) -> None:
        """Begin to read blocks, in their order, as far as there is room; forget others that are read ahead."""
        while self._behind and self._behind[0][1].done():
            self._finish_write()
        wanted: dict[Hashable, None] = {}
        for key in keys:
            if len(wanted) >= self._most_reading:
                break
            wanted[key] = None
        for key in [key for key in self._reading if key not in wanted]:
            self._forget(key)
        # Whoever needs a block waits for its own read, and never takes whichever has ended: a fetch of parameters is a
        # collective, in an order that is the same on all ranks.
        for key in wanted:
            if key in self._reading:
                continue
            region = self._regions[key]
            buffer = self._pool.take(region.padded)
            if buffer is None:
                return
            try:
                self._reading[key] = buffer, self._store.read(region, buffer)
            except BaseException:
                self._pool.give(buffer)
                raise

    def stream(self, keys: Sequence[Hashable], write: bool, provisional: bool = False) -> Generator[torch.Tensor]:
        """Yield blocks in order, each until the next one is asked for; see ``stream``."""
        regions = [self._regions[key] for key in keys]
        with closing(stream(self._store, regions, self._pool, write, provisional)) as buffers:
            yield from (buffer.memory for buffer in buffers)

    def _free(self, region: Region) -> Buffer:
        """Return a buffer that nothing is done with; where all are used, one that is written from or needed last."""
        while (buffer := self._pool.take(region.padded)) is None:
            if self._behind:
                with span("wait_disk"):
                    self._finish_write()
            else:
                assert self._reading, "a block is asked for while others stream"
                self._forget(next(reversed(self._reading)))
        return buffer

    def _finish_write(self) -> None:
        buffer, pending = self._behind.popleft()
        try:
            pending.wait()
        finally:
            self._pool.give_settled(buffer)

    def _forget(self, key: Hashable) -> None:
        """Give up what is read ahead; nobody will ask whether it went well."""
        if key in self._reading:
            self._pool.give_settled(self._reading.pop(key)[0])


def stream(
    store: FileStore, regions: Iterable[Region], buffers: Buffers, write: bool = True, provisional: bool = False
) -> Generator[Buffer]:
    """Yield each region in a buffer, in order: while one is computed with, the next are read and the last are written.

    The caller has a buffer until it asks for the next one. Where it leaves early, its last buffer is not written.

    Raises:
        OSError: the disk failed, or the file was changed.
    """
    # With three buffers all three go on at once; with one, which must be free and hold the largest region, by turns. No
    # event of a device is waited for: masters and states are computed with on the host, and parameters are staged.
    waiting = deque(regions)
    reading: deque[tuple[Region, Buffer, PendingRequest]] = deque()
    writing: deque[tuple[Buffer, PendingRequest]] = deque()
    lent: list[Buffer] = []
    try:
        while waiting or reading:
            while writing and writing[0][1].done():
                _finish(writing, lent, buffers)
            while waiting and (buffer := buffers.take(waiting[0].padded)) is not None:
                lent.append(buffer)
                reading.append((waiting[0], buffer, store.read(waiting[0], buffer)))
                waiting.popleft()
            if not reading:
                assert writing, f"no buffer of the pool holds a region of {waiting[0].padded} bytes"
                _finish(writing, lent, buffers)
                continue
            region, buffer, pending = reading.popleft()
            pending.wait()
            yield buffer
            if write:
                writing.append((buffer, store.write(region, buffer, provisional)))
            else:
                lent.remove(buffer)
                buffers.give(buffer)
        while writing:
            _finish(writing, lent, buffers)
    finally:
        for buffer in lent:  # the first error, if any, is on its way to the caller
            buffers.give_settled(buffer)


def _finish(writing: deque[tuple[Buffer, PendingRequest]], lent: list[Buffer], buffers: Buffers) -> None:
    buffer, pending = writing.popleft()
    pending.wait()
    lent.remove(buffer)
    buffers.give(buffer)


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
