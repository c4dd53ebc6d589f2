"""Parameters that rest in blocks, as on NVMe: in host memory only while they are read ahead, used, or written behind.

Source: Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning", 2021.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from zeromesh.comm.mesh import Mesh
from zeromesh.shard.parameters.flat import Flat
from zeromesh.shard.parameters.unit import Unit
from zeromesh.shard.store.memory import unloaded
from zeromesh.shard.store.stores import StorePlace


class Stored:
    """Loads the shards of flat buffers from their blocks into memory, one at a time, and back."""

    def __init__(self, flats: Sequence[Flat], place: StorePlace, mesh: Mesh) -> None:
        self.blocks = place.open({flat: flat.layout.shard_bytes for flat in flats}, mesh)
        self.tier = place.tier
        self._flats = frozenset(flats)
        self._here: Flat | None = None  # whose `shard` is a view of its block
        self._dirty = self._known = False
        self._failure: OSError | None = None

    def __contains__(self, flat: Flat) -> bool:
        return flat in self._flats

    def load(self, flat: Flat, write: bool = False, read: bool = True) -> None:
        """Have one flat buffer's shard in memory until another one's is asked for, or others are read ahead.

        Raises:
            OSError: the disk failed, now or earlier.
        """
        # After a failure nothing is loaded any more: some parameters would be those from before the update.
        if self._failure is not None:
            raise self._failure
        if self._here is not flat or (read and not self._known):
            try:
                self._put_away()
                memory = self.blocks.take(flat, read)
            except OSError as error:
                self._failure = error
                raise
            self._here, self._known = flat, read
            shard = (memory if read else memory.zero_())[: flat.layout.shard_bytes].view(flat.layout.dtype)
            _bind(flat, shard)
        self._known, self._dirty = self._known or write, self._dirty or write

    def read_ahead(self, units: Iterable[Unit]) -> None:
        """Begin to read what units will need, in their order, as far as there is room; forget all else."""
        try:
            self._put_away()
            self.blocks.read_ahead(flat for unit in units for flat in unit.flats if flat in self._flats)
        except OSError as error:
            self._failure = self._failure or error  # whoever loads next says so: nobody expects it from a plan

    def _put_away(self) -> None:
        """Begin to write what ``load`` has loaded, if it may be others now, and let it be unloaded."""
        if self._here is None:
            return
        flat, self._here = self._here, None
        dirty, self._dirty = self._dirty, False
        # `flat.shard` has the host wait for the last copy between the buffer and the device: only then may the disk
        # read from the buffer, or write to it.
        _bind(flat, unloaded(flat.shard))
        # What is frozen comes back after each use, as somebody might have changed it; nearly always it is the same.
        self.blocks.give(flat, dirty and (flat.layout.trainable or self.blocks.changed(flat)), behind=True)


def _bind(flat: Flat, shard: torch.Tensor) -> None:
    """Let the shard, and of what is frozen the master, be in some memory, or in none."""
    flat.bind_shard(shard)
    if not flat.layout.trainable:
        flat.bind_master(shard)
