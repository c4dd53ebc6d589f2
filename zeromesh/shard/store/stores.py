"""Stores of states off the device: what they can do, and which one each tier has."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zeromesh.base.placement import Tier
from zeromesh.comm.mesh import Mesh
from zeromesh.shard.store.file_blocks import FileBlocks
from zeromesh.shard.store.memory import MemoryBlocks, empty_on
from zeromesh.shard.store.nvme import Disk

BlockStore = MemoryBlocks | FileBlocks
"""Blocks of bytes by key on some tier; ``MemoryBlocks`` says what each method does."""

STORES: dict[Tier, Any] = {Tier.HOST: MemoryBlocks, Tier.NVME: FileBlocks}
"""Class of the blocks on each tier; host memory has blocks for masters in halves alone."""


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
