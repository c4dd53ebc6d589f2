"""Parameters that rest on NVMe: in host memory only while they are read ahead, used, or written behind.

Source: Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning", 2021.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch

from zeromesh.base.placement import Tier
from zeromesh.base.spans import span
from zeromesh.comm.mesh import Mesh
from zeromesh.shard.parameters.flat import Flat
from zeromesh.shard.parameters.slots import largest
from zeromesh.shard.parameters.unit import Unit
from zeromesh.shard.store.direct_buffers import Buffer, Buffers
from zeromesh.shard.store.memory import empty_on, unloaded
from zeromesh.shard.store.nvme import Disk, FileStore, PendingRequest, Region
from zeromesh.shard.store.swap_file import aligned


class Stored:
    """Loads the shards of flat buffers from NVMe into memory, one at a time, and back."""

    def __init__(self, flats: Sequence[Flat], disk: Disk, mesh: Mesh, pinned: bool = True) -> None:
        self._store = FileStore(disk.folder, mesh.rank, disk.block_size, disk.queue_depth)
        self._regions = {
            flat: self._store.allocate(flat.layout.shard_size * flat.layout.dtype.itemsize) for flat in flats
        }
        try:
            self._store.reserve()
            self._pool = Buffers(
                buffer_bytes(flats, disk), lambda nbytes: empty_on(Tier.HOST, nbytes, torch.uint8, mesh.device, pinned)
            )
        except BaseException:
            self._store.close()
            raise
        self.nbytes, self.host_bytes, self.folder = self._store.nbytes, self._pool.nbytes, self._store.path.parent
        self.traffic, self.close = self._store.traffic, self._store.close
        self._most_reading = disk.buffers - 1  # one is left for what was not foreseen
        self._reading: dict[Flat, tuple[Buffer, PendingRequest]] = {}
        self._behind: deque[tuple[Buffer, PendingRequest]] = deque()
        self._here: tuple[Flat, Buffer] | None = None  # whose `shard` is a view of the buffer
        self._dirty = self._known = False
        self._failure: OSError | None = None

    def __contains__(self, flat: Flat) -> bool:
        return flat in self._regions

    def load(self, flat: Flat, write: bool = False, read: bool = True) -> None:
        """Have one flat buffer's shard in memory until another one's is asked for, or others are read ahead.

        Raises:
            OSError: the disk failed, now or earlier.
        """
        # After a failure nothing is loaded any more: some parameters would be those from before the update.
        if self._failure is not None:
            raise self._failure
        if self._here is None or self._here[0] is not flat or (read and not self._known):
            try:
                self._put_away()
                self._here = flat, self._take(flat, read)
            except OSError as error:
                self._failure = error
                raise
            self._known = read
            _bind(flat, self._here[1].tensor(flat.layout.shard_size, flat.layout.dtype))
        self._known, self._dirty = self._known or write, self._dirty or write

    def read_ahead(self, units: Iterable[Unit]) -> None:
        """Begin to read what units will need, in their order, as far as there is room; forget all else."""
        try:
            self._begin_reads(units)
        except OSError as error:
            self._failure = self._failure or error  # whoever loads next says so: nobody expects it from a plan

    def _begin_reads(self, units: Iterable[Unit]) -> None:
        self._put_away()
        while self._behind and self._behind[0][1].done():
            self._finish_write()
        wanted: dict[Flat, None] = {}
        for flat in (flat for unit in units for flat in unit.flats if flat in self._regions):
            if len(wanted) >= self._most_reading:
                break
            wanted[flat] = None
        for flat in [flat for flat in self._reading if flat not in wanted]:
            self._forget(flat)
        # A fetch is a collective, in an order that is the same on all ranks: whoever needs a flat buffer waits for its
        # own read, and never takes whichever has ended.
        for flat in wanted:
            if flat in self._reading:
                continue
            region = self._regions[flat]
            buffer = self._pool.take(region.padded)
            if buffer is None:
                return
            try:
                self._reading[flat] = buffer, self._store.read(region, buffer)
            except BaseException:
                self._pool.give(buffer)
                raise

    def _take(self, flat: Flat, read: bool) -> Buffer:
        """A buffer with the flat buffer's region, or with zeros."""
        if not read and flat in self._reading:
            self._forget(flat)
        region = self._regions[flat]
        buffer, pending = self._reading.pop(flat, (None, None))
        buffer = buffer or self._free(region)
        try:
            if read:
                with span("wait_disk"):
                    (pending or self._store.read(region, buffer)).wait()
            else:
                buffer.memory[: region.padded].zero_()
        except BaseException:
            self._pool.give_settled(buffer)
            raise
        return buffer

    def _free(self, region: Region) -> Buffer:
        """A buffer that nothing is done with: where all are used, one that is written from, or the one needed last."""
        while (buffer := self._pool.take(region.padded)) is None:
            if self._behind:
                with span("wait_disk"):
                    self._finish_write()
            else:
                self._forget(next(reversed(self._reading)))
        return buffer

    def _put_away(self) -> None:
        """Begin to write what ``load`` has loaded, if it may be others now, and let it be unloaded."""
        if self._here is None:
            return
        (flat, buffer), self._here = self._here, None
        dirty, self._dirty = self._dirty, False
        region = self._regions[flat]
        # `flat.shard` has the host wait for the last copy between the buffer and the device: only then may the disk
        # read from the buffer, or write to it.
        _bind(flat, unloaded(flat.shard))
        try:
            # What is frozen comes back after each use, as somebody might have changed it; nearly always it is the same.
            if dirty and (flat.layout.trainable or not self._store.holds(region, buffer)):
                self._behind.append((buffer, self._store.write(region, buffer)))
                return
        except BaseException:
            self._pool.give(buffer)
            raise
        self._pool.give(buffer)

    def _finish_write(self) -> None:
        buffer, pending = self._behind.popleft()
        try:
            pending.wait()
        finally:
            self._pool.give_settled(buffer)

    def _forget(self, flat: Flat) -> None:
        """Give up what is read ahead; nobody will ask whether it went well."""
        self._pool.give_settled(self._reading.pop(flat)[0])


def buffer_bytes(flats: Sequence[Flat], disk: Disk) -> list[int]:
    """Return the size of each buffer in host memory, so that the largest shards fit at once."""
    return largest((aligned(flat.layout.shard_size * flat.layout.dtype.itemsize) for flat in flats), disk.buffers)


def _bind(flat: Flat, shard: torch.Tensor) -> None:
    """Let the shard, and of what is frozen the master, be in some memory, or in none."""
    flat.bind_shard(shard)
    if not flat.layout.trainable:
        flat.bind_master(shard)
