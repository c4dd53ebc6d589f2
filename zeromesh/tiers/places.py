"""Blocks of bytes by key, where they rest: in host memory, or in a file from which they come and to which they go.

Both lend a block's memory, uint8 and 1-D, until it is given back. In host memory that is where it rests.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Hashable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Protocol

import torch

from zeromesh.tiers.buffers import Allocate, Buffer, Buffers
from zeromesh.tiers.nvme import FileStore, Region
from zeromesh.tiers.stream import stream
from zeromesh.tiers.traffic import DiskTraffic


class Place(Protocol):
    """Storage of blocks."""

    nbytes: int  # of all blocks
    host_bytes: int  # of host memory that they take on their way
    folder: Path | None  # of the file; None where there is none

    def take(self, key: Hashable, read: bool) -> torch.Tensor:
        """Return a block's memory, with its contents if ``read``. Raises OSError if the disk failed."""

    def give(self, key: Hashable, write: bool) -> None:
        """Return a block; with ``write`` it holds something else now. Raises OSError if the disk failed."""

    def stream(self, keys: Sequence[Hashable], write: bool, provisional: bool = False) -> Generator[torch.Tensor]:
        """Yield blocks in order, each until the next one is asked for. Raises OSError if the disk failed."""

    def commit(self) -> None:
        """Let what was written provisionally count. Raises OSError as ``FileStore.commit``."""

    def drop(self) -> None:
        """Forget what was written provisionally."""

    def traffic(self) -> DiskTraffic | None:
        """Return the traffic of the disk so far; None where there is none."""

    def close(self) -> None:
        """Delete the file."""


class Memory:
    """Blocks in host memory, which is zeros at first. Nothing in it is provisional."""

    def __init__(self, sizes: Mapping[Hashable, int], allocate: Allocate) -> None:
        self._blocks = {key: allocate(size).zero_() for key, size in sizes.items()}
        self.nbytes = sum(sizes.values())
        self.host_bytes = 0
        self.folder: Path | None = None

    def take(self, key: Hashable, read: bool) -> torch.Tensor:
        """See ``Place.take``."""
        return self._blocks[key]

    def give(self, key: Hashable, write: bool) -> None:
        """See ``Place.give``."""

    def stream(self, keys: Sequence[Hashable], write: bool, provisional: bool = False) -> Generator[torch.Tensor]:
        """See ``Place.stream``."""
        assert not provisional
        yield from (self._blocks[key] for key in keys)

    def commit(self) -> None:
        """See ``Place.commit``."""

    def drop(self) -> None:
        """See ``Place.drop``."""

    def traffic(self) -> DiskTraffic | None:
        """See ``Place.traffic``."""
        return None

    def close(self) -> None:
        """See ``Place.close``."""


class File:
    """Blocks in a file: read ahead and written behind where they stream."""

    def __init__(
        self, sizes: Mapping[Hashable, int], store: FileStore, buffers: Sequence[int], allocate: Allocate,
        spares: Collection[Hashable] = (),
    ) -> None:  # fmt: skip
        self._store = store  # of the file; it is closed if there is no room
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
        """See ``Place.take``."""
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
        """See ``Place.give``."""
        buffer = self._lent.pop(key)
        try:
            if write:
                self._store.write(self._regions[key], buffer).wait()
        finally:
            self._pool.give(buffer)

    def stream(self, keys: Sequence[Hashable], write: bool, provisional: bool = False) -> Generator[torch.Tensor]:
        """Stream blocks; meanwhile the next are read, and with ``write`` the last are written. See ``Place.stream``."""
        regions = [self._regions[key] for key in keys]
        with closing(stream(self._store, regions, self._pool, write, provisional)) as buffers:
            yield from (buffer.memory for buffer in buffers)
