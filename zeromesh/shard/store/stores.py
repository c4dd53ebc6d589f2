"""Stores of states off the device: what they can do, and which one each tier has."""

from __future__ import annotations

from collections.abc import Collection, Generator, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from zeromesh.base.placement import Tier
from zeromesh.comm.mesh import Mesh
from zeromesh.shard.store.file_blocks import FileBlocks
from zeromesh.shard.store.memory import MemoryBlocks, empty_on
from zeromesh.shard.store.nvme import Disk
from zeromesh.shard.store.swap_file import DiskTraffic


class BlockStore(Protocol):
    """Blocks of bytes by key; their memory on the host, uint8 and 1-D, is lent until it is given back.

    It is made of ``(sizes by key, function that makes host memory, Disk or None, rank, keys of which two versions are
    there at a time)``. ``Swap`` puts masters and optimizer states into blocks, in windows, and ``Stored`` parameters.
    Masters in halves are the form of a block, and updates during the backward are provisional writes: both work over
    any store.
    """

    in_memory: bool  # blocks rest in host memory: they count there, and are changed in place, never provisionally
    nbytes: int  # of the blocks
    host_bytes: int  # of the buffers that they are lent in
    folder: Path | None  # of files

    @staticmethod
    def buffer_sizes(sizes: Iterable[int], disk: Disk | None) -> list[int]:
        """Return the sizes of the buffers for blocks of these sizes."""

    def take(self, key: Hashable, read: bool) -> torch.Tensor:
        """Return a block's memory, with its contents if ``read``."""

    def changed(self, key: Hashable) -> bool:
        """Return whether the memory of a block that was taken has to be written, by what it holds."""

    def give(self, key: Hashable, write: bool, behind: bool = False) -> None:
        """Return a block; with ``write`` it holds something else now. ``behind``: it is written some time later."""

    def read_ahead(self, keys: Iterable[Hashable]) -> None:
        """Begin to read the blocks that are taken next, in order."""

    def stream(self, keys: Sequence[Hashable], write: bool, provisional: bool = False) -> Generator[torch.Tensor]:
        """Yield blocks in order, each until the next one is asked for; what is ``provisional`` awaits ``commit``."""

    def commit(self) -> None:
        """Let what was written provisionally count."""

    def drop(self) -> None:
        """Forget what was written provisionally."""

    def traffic(self) -> DiskTraffic | None:
        """Return the traffic of the disk so far; None where there is none."""

    def close(self) -> None:
        """Give all blocks up."""


STORES: dict[Tier, Any] = {Tier.HOST: MemoryBlocks, Tier.NVME: FileBlocks}
"""Class of the blocks on each tier; see ``BlockStore``. Host memory has blocks for masters in halves alone."""


@dataclass(frozen=True)
class StorePlace:
    """A tier whose states are in blocks."""

    tier: Tier
    disk: Disk | None = None  # where the tier is a disk
    pinned: bool = True  # host memory is page-locked where there is a GPU

    @property
    def in_memory(self) -> bool:
        """True if blocks rest in host memory."""
        return bool(STORES[self.tier].in_memory)

    def open(self, sizes: Mapping[Hashable, int], mesh: Mesh, spares: Collection[Hashable] = ()) -> BlockStore:
        """Return a store with blocks of these sizes; of ``spares`` two versions at a time."""

        def allocate(nbytes: int) -> torch.Tensor:
            return empty_on(Tier.HOST, nbytes, torch.uint8, mesh.device, self.pinned)

        store: BlockStore = STORES[self.tier](sizes, allocate, self.disk, mesh.rank, spares)
        return store

    def buffer_bytes(self, sizes: Iterable[int]) -> int:
        """Return the bytes of all buffers for blocks of these sizes."""
        return sum(STORES[self.tier].buffer_sizes(sizes, self.disk))
