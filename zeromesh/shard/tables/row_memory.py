"""Memory of one rank's rows of a table: weights and states on a tier, and a cache of the rows used last."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import islice
from pathlib import Path

import torch

from zeromesh.base.placement import Tier
from zeromesh.shard.store.memory import empty_on, read_ahead

AHEAD = 64  # values of a row in a plane that are read ahead of use
COOLING = 0.9  # factor of what a use of a row counts for, for each batch since


def plane_on(
    tier: Tier, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, folder: Path | None
) -> torch.Tensor:
    """Return memory for ``shape[1]`` values of each row, zeros; on NVMe it is mapped from a file in ``folder``.

    Raises:
        OSError: the folder has no room.
    """
    elements = shape[0] * shape[1]
    if tier is not Tier.NVME or not elements:
        return empty_on(tier, elements, dtype, device, pin=False).zero_().view(shape)
    number, name = tempfile.mkstemp(prefix="zeromesh-table-", dir=folder)
    try:
        # Now, as a write to a page that has no room ends the process.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(number, 0, elements * dtype.itemsize)
        return torch.from_file(name, shared=True, size=elements, dtype=dtype).view(shape)
    except OSError as error:
        raise OSError(error.errno, f"no room for {elements * dtype.itemsize:,} bytes of a table: {error}") from error
    finally:
        os.close(number)
        with suppress(PermissionError):  # of systems that keep names of open files
            os.unlink(name)  # the mapping keeps it until the process ends, however it does


def plainly() -> AbstractContextManager[None]:
    """Return a context outside of inference mode: tensors made in it, as of a cache, could not be changed later."""
    return _outside() if torch.is_inference_mode_enabled() else torch.no_grad()


@contextmanager
def _outside() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


class RowMemory:
    """Planes of values by row: the weights first, then states."""

    def __init__(
        self, weights: torch.Tensor, device: torch.device, hot: int | None = None, on_host: bool = False
    ) -> None:
        self.planes = [weights]  # each of shape (rows, width), where they rest
        self._device, self._fixed = device, on_host
        self._hot = None if hot is None else HotRows(weights.shape[0], hot, torch.device("cpu") if on_host else device)

    def replace(self, planes: Sequence[torch.Tensor]) -> None:
        """Use other memory for the planes."""
        self.planes = list(planes)

    def read(self, ids: torch.Tensor) -> torch.Tensor:
        """Return a copy of the weights of rows ``ids`` (int64, on the device): shape (k, width), on the device."""
        with plainly():
            if self._hot is not None:
                slots = self._hot.admit(ids, self.planes)
                return self._hot.planes[0].index_select(0, slots).to(self._device)
            weights = self.planes[0]
            return weights.index_select(0, ids.to(weights.device)).to(self._device)

    def change(self, ids: torch.Tensor, do: Callable[[list[torch.Tensor]], None], count: int | None = None) -> None:
        """Call ``do`` with copies of rows ``ids``, without duplicates, of the first ``count`` planes; write them back.

        The copies are where the planes are, or the cache.
        """
        with plainly():
            planes = self.planes
            if self._hot is not None:
                ids = self._hot.admit(ids, self.planes)
                self._hot.dirty[ids.cpu()] = True
                planes = self._hot.planes
            ids = ids.to(planes[0].device)
            copies = [plane.index_select(0, ids) for plane in planes[:count]]
            do(copies)
            for plane, copy in zip(planes, copies, strict=False):
                plane.index_copy_(0, ids, copy)

    def in_place(self, ids: torch.Tensor, do: Callable[[int, list[torch.Tensor]], bool]) -> None:
        """Call ``do`` with each row of ``ids``, without duplicates, and its values in all planes, 1-D.

        They are where the planes are, or in the cache. ``do`` returns whether it has changed them.
        """
        host = ids.cpu()
        # Files are mapped. On a page fault the disk would have one request at a time, and read what is beside it.
        absent = [] if self._hot is None else self._hot.absent(host)
        coming = (plane[row] for row in absent for plane in self.planes)
        read_ahead(islice(coming, AHEAD))
        with plainly():
            slots = torch.full_like(host, -1) if self._hot is None else self._hot.admit_some(host, self.planes)
            for row, slot in zip(host.tolist(), slots.tolist(), strict=True):
                if self._hot is None or slot < 0:
                    do(row, [plane[row] for plane in self.planes])
                elif do(row, [plane[slot] for plane in self._hot.planes]):
                    self._hot.dirty[slot] = True
                read_ahead(islice(coming, len(self.planes)))

    @property
    def place(self) -> torch.device:
        """Device on which ``change`` computes."""
        return self.planes[0].device if self._hot is None else self._device

    @property
    def cache_tier(self) -> Tier:
        """Return where the cache is, if there is one."""
        return Tier.HOST if self._fixed else Tier.DEVICE

    @property
    def nbytes(self) -> int:
        """Bytes of the cache."""
        return 0 if self._hot is None else sum(plane.nbytes for plane in self._hot.planes)

    def settle(self, forget: bool = False) -> None:
        """Write changed rows of the cache to the planes; ``forget``: the planes are about to change."""
        if self._hot is not None:
            self._hot.write_back(self.planes)
            if forget:
                self._hot.drop(self.planes)


class HotRows:
    """A cache of rows on a faster tier; the rows that were used least recently leave."""

    def __init__(self, rows: int, capacity: int, device: torch.device) -> None:
        self.planes: list[torch.Tensor] = []
        self.capacity = min(rows, capacity)
        self._device = device
        # On the host, where the decisions are made.
        self._slot_of = torch.full((rows,), -1, dtype=torch.int32)
        self._heat = torch.zeros(rows)  # uses of each row, of which older ones count less
        self._begin()

    def _begin(self) -> None:
        self._row_in = torch.full((self.capacity,), -1)
        self._used = torch.zeros(self.capacity, dtype=torch.int64)
        self.dirty = torch.zeros(self.capacity, dtype=torch.bool)
        self._tick = 0

    def admit(self, ids: torch.Tensor, backing: Sequence[torch.Tensor]) -> torch.Tensor:
        """Bring rows ``ids`` into the cache; return their slots, on the device."""
        host = ids.cpu()
        distinct = host.unique()
        if distinct.numel() > self.capacity:  # a batch needs more than there is room for
            self.write_back(backing)
            self.drop(backing, distinct.numel())
        if not self.planes:
            self.planes = [
                torch.empty(self.capacity, plane.shape[1], dtype=plane.dtype, device=self._device) for plane in backing
            ]
        self._tick += 1
        slots = self._slot_of[distinct].long()
        self._used[slots[slots >= 0]] = self._tick
        missing = distinct[slots < 0]
        if missing.numel():
            # Those of this batch were used at this tick, so that they are never among the least recently used.
            free = self._used.topk(missing.numel(), largest=False).indices
            self._evict(free, backing)
            self._slot_of[missing] = free.int()
            self._row_in[free], self._used[free] = missing, self._tick
            at = free.to(self._device)
            for plane, source in zip(self.planes, backing, strict=True):
                rows = source.index_select(0, missing.to(source.device))
                plane.index_copy_(0, at, rows.to(self._device))
        return self._slot_of[host].long().to(self._device)

    def absent(self, ids: torch.Tensor) -> list[int]:
        """Return those of rows ``ids``, on the host, that are not in the cache."""
        return [int(row) for row in ids[self._slot_of[ids] < 0]]

    def admit_some(self, ids: torch.Tensor, backing: Sequence[torch.Tensor]) -> torch.Tensor:
        """Bring rows ``ids``, on the host and without duplicates, into the cache if it has room for all of them.

        If not, those that are used most have it. Returns their slots; -1 of rows that are not in the cache.
        """
        self._heat.mul_(COOLING)[ids] += 1
        if ids.numel() > self.capacity:
            # Those in the cache stay unless another one is clearly hotter: a row costs two copies to come and to leave.
            heat = self._heat[ids] + (self._slot_of[ids] >= 0)
            self.admit(ids[heat.topk(self.capacity).indices], backing)
        else:
            self.admit(ids, backing)
        return self._slot_of[ids].long()

    def _evict(self, slots: torch.Tensor, backing: Sequence[torch.Tensor]) -> None:
        self._store(slots[self.dirty[slots]], backing)
        leaving = self._row_in[slots]
        self._slot_of[leaving[leaving >= 0]] = -1

    def _store(self, slots: torch.Tensor, backing: Sequence[torch.Tensor]) -> None:
        if slots.numel():
            rows, at = self._row_in[slots], slots.to(self._device)
            for plane, target in zip(self.planes, backing, strict=True):
                target.index_copy_(0, rows.to(target.device), plane.index_select(0, at).to(target.device))
            self.dirty[slots] = False

    def write_back(self, backing: Sequence[torch.Tensor]) -> None:
        """Write changed rows to the planes that they come from."""
        self._store(self.dirty.nonzero().flatten(), backing)

    def drop(self, backing: Sequence[torch.Tensor], capacity: int | None = None) -> None:
        """Empty the cache, and give it room for more rows if ``capacity`` says so."""
        if self.planes and len(self.planes) == len(backing):
            self.write_back(backing)
        self._slot_of.fill_(-1)
        self.planes, self.capacity = [], max(self.capacity, capacity or 0)
        self._begin()
