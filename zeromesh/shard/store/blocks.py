"""Blocks of bytes by key, in host memory or in a file; their memory, uint8 and 1-D, is lent until it is given back."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Generator, Hashable, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import torch

from zeromesh.shard.store.direct_buffers import Allocate, Buffer, Buffers
from zeromesh.shard.store.disk_traffic import DiskTraffic
from zeromesh.shard.store.nvme import FileStore, PendingRequest, Region


class Memory:
    """Blocks in host memory, which is zeros at first. Nothing in it is provisional, or could be closed."""

    folder: Path | None = None
    host_bytes = 0

    def __init__(self, sizes: Mapping[Hashable, int], allocate: Allocate) -> None:
        self._blocks = {key: allocate(size).zero_() for key, size in sizes.items()}
        self.nbytes = sum(sizes.values())

    def take(self, key: Hashable, read: bool) -> torch.Tensor:
        """Return a block, where it rests."""
        return self._blocks[key]

    def give(self, key: Hashable, write: bool) -> None:
        """Do nothing: the block is where it rests."""

    def stream(self, keys: Sequence[Hashable], write: bool, provisional: bool = False) -> Generator[torch.Tensor]:
        """Yield blocks in order."""
        assert not provisional
        yield from (self._blocks[key] for key in keys)

    def traffic(self) -> DiskTraffic | None:
        """Return None: there is no disk."""
        return None

    def close(self) -> None:
        """Do nothing: the memory goes with its last user."""

    commit = drop = close


class File:
    """Blocks in a file: read ahead and written behind where they stream. All of it raises OSError if the disk fails."""

    def __init__(
        self, sizes: Mapping[Hashable, int], store: FileStore, buffers: Sequence[int], allocate: Allocate,
        spares: Collection[Hashable] = (),
    ) -> None:  # fmt: skip
        self._store = store
        self._regions: dict[Hashable, Region] = {key: store.allocate(size) for key, size in sizes.items()}
        for key in spares:
            store.allocate_spare(sizes[key])
        try:
            store.reserve()
            self._pool = Buffers(buffers, allocate)
        except BaseException:
            store.close()
            raise
        self._lent: dict[Hashable, Buffer] = {}
        self.nbytes, self.host_bytes = store.nbytes, self._pool.nbytes
        self.folder: Path | None = store.path.parent
        self.commit, self.drop, self.traffic, self.close = store.commit, store.drop, store.traffic, store.close

    def take(self, key: Hashable, read: bool) -> torch.Tensor:
        """Return a block's memory, with its contents if ``read``."""
        region = self._regions[key]
        buffer = self._pool.take(region.padded)
        assert buffer is not None, "a block is asked for while others stream"
        try:
            if read:
                self._store.read(region, buffer).wait()
        except BaseException:
            self._pool.give(buffer)
            raise
        self._lent[key] = buffer
        return buffer.memory

    def give(self, key: Hashable, write: bool) -> None:
        """Return a block; with ``write`` it holds something else now."""
        buffer = self._lent.pop(key)
        try:
            if write:
                self._store.write(self._regions[key], buffer).wait()
        finally:
            self._pool.give(buffer)

    def stream(self, keys: Sequence[Hashable], write: bool, provisional: bool = False) -> Generator[torch.Tensor]:
        """Yield blocks in order, each until the next one is asked for; see ``stream``."""
        regions = [self._regions[key] for key in keys]
        with closing(stream(self._store, regions, self._pool, write, provisional)) as buffers:
            yield from (buffer.memory for buffer in buffers)


Place = Memory | File


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
