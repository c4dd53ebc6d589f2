"""A unit: parameters that travel together, and the storage in which they are computed with."""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import nn

from zeromesh.base.axes import AXES
from zeromesh.base.placement import Placement, PlacementRow
from zeromesh.base.spans import span
from zeromesh.comm.collectives import Pending
from zeromesh.comm.mesh import Mesh
from zeromesh.shard.layout import round_up
from zeromesh.shard.parameters.flat import Flat, Materialise, Store, rebind
from zeromesh.shard.parameters.slots import Slot, attach, detach
from zeromesh.shard.store.link import Link
from zeromesh.shard.store.memory import allocate


class State(enum.Enum):
    """State of a unit's parameters."""

    # They are at rest: the unit's storage is empty (sharded) or holds values from before the update (replicated).
    AT_REST = "at rest"
    FETCHING = "fetching"  # they are on their way into the unit's storage
    FETCHED = "fetched"  # they are whole and current in the unit's storage


class Unit:
    """One unit of the model."""

    def __init__(self, index: int, name: str, module: nn.Module, parent: Unit | None) -> None:
        self.index = index  # position in the order of registration; the root has index 0
        self.name = name  # of the module in the model; empty for the root
        self.module = module
        self.parent = parent  # the unit that encloses it, None for the root
        # The units that enclose this one.
        self.ancestors: frozenset[Unit] = frozenset() if parent is None else parent.ancestors | {parent}
        self.flats: tuple[Flat, ...] = ()
        self.nbytes = 0
        self.members: list[nn.Parameter] = []
        self._offsets: list[int] = []  # of the flat buffers in the storage
        self._starts: list[int] = []  # of the members in the storage
        self._references = 0  # to the storage, from the unit's own views
        self.storage = torch.UntypedStorage(0)
        self.lent: torch.UntypedStorage | None = None  # where the parameters are once their slot is needed; see `evict`
        self._lent_views: list[tuple[torch.Tensor, ...]] = []  # of the parameters there
        self.state = State.AT_REST
        self.version = 0  # updates so far
        self.sharded = False
        self.slot: Slot | None = None
        self._pending: list[Pending] = []

    @property
    def has_experts(self) -> bool:
        """True for experts, which are used inside of another unit."""
        return any(AXES[flat.layout.axis].folded for flat in self.flats)

    def __repr__(self) -> str:
        return f"unit {self.name or '(root)'!r}"

    def place(
        self,
        flats: Sequence[Flat],
        row: PlacementRow,
        mesh: Mesh,
        mixed: bool,
        materialise: Materialise | None,
        link: Link,
        store: Store,
    ) -> None:
        """Make the storage and the states, and take the parameters' values into them."""
        self.flats = tuple(flats)
        self._link = link
        self.sharded = row.parameter is Placement.SHARDED
        for flat in flats:
            self._offsets.append(self.nbytes)
            self.nbytes = round_up(self.nbytes + flat.layout.nbytes, 64)
        self.storage = allocate(self.nbytes, mesh.device)
        for flat, offset in zip(flats, self._offsets, strict=True):
            flat.bind(self.storage, offset)
            self.members += flat.parameters
            self._starts += [offset + segment.start * flat.layout.dtype.itemsize for segment in flat.layout.segments]
        if self.sharded:
            self.storage.resize_(0)  # from here on parameters are fetched into slots
        for flat in flats:
            flat.fill(row, mesh, mixed, materialise, store)
        self.state = State.AT_REST if self.sharded else State.FETCHED
        self._references = self._count_references()

    def _count_references(self) -> int:
        return int(torch._C._storage_Use_Count(self.storage._cdata))

    def member_at(self, offset: int) -> int:
        """Return the index of the member at this byte of the storage."""
        return max(0, bisect_right(self._starts, offset) - 1)

    def begin_fetch(self, mesh: Mesh, slot: Slot | None) -> None:
        """Start to fetch the parameters into the storage; ``slot`` is the memory to use where they are sharded."""
        assert self.state is State.AT_REST, (self, self.state)
        if self.sharded:
            assert slot is not None
            self.slot = slot
            attach(self.storage, slot)
        # Inside torch.func.jvp and the like, too, this is plain memory.
        with torch._C._DisableFuncTorch(), span("fetch", self.name or "(root)"):
            for flat in self.flats:
                if self.sharded or flat.gathers:
                    self._pending += flat.begin_fetch(mesh, self._link)
        self.state = State.FETCHING

    def count_update(self) -> None:
        """Count an update, so that a backward of an older forward is noticed."""
        self.version += 1

    def expire(self) -> None:
        """Note that the storage has values from before an update; only where parameters are replicated."""
        assert self.state is State.FETCHED, (self, self.state)
        self.state = State.AT_REST

    def finish_fetch(self) -> None:
        """Wait until the parameters are there."""
        assert self.state is not State.AT_REST, (self, self.state)
        with span("wait_fetch", self.name or "(root)"):
            for pending in self._pending:
                pending.wait()
        self._pending.clear()
        self.state = State.FETCHED

    def make_exact(self, mesh: Mesh) -> None:
        """Gather anew what was rounded on its way; all ranks call this, with the parameters in memory."""
        self.take_changes()
        for flat in self.flats:
            if flat.rounds and (self.sharded or flat.gathers):
                flat.load_states()
                flat.group.all_gather(flat.full, flat.master, flat.tag).wait()
                if flat.narrow is not None:
                    flat.narrow.note_exact()

    def _bind(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage
        for flat, offset in zip(self.flats, self._offsets, strict=True):
            flat.bind(storage, offset)
            for parameter, view in zip(flat.parameters, flat.views, strict=True):
                rebind(parameter, view)
            flat.watch()
        self._references = self._count_references()

    def take_changes(self) -> None:
        """See ``Flat.take_changes``."""
        for index, flat in enumerate(self.flats):
            flat.take_changes(self._lent_views[index] if self._lent_views else ())

    def evict(self, lends: bool = False) -> Slot:
        """Give the slot up, where parameters are sharded; the storage is empty from here on.

        With ``lends`` the parameters stay in its memory until ``take_back``, and the slot gets new memory.
        """
        assert self.state is State.FETCHED, (self, self.state)
        assert self.slot is not None
        exposed = [set(flat.exposed) for flat in self.flats]
        self.take_changes()  # of what others wrote in place, nothing is left once the memory is gone
        for flat in self.flats:
            if not flat.layout.trainable:  # momentum encoders and codebooks are written through ``.data``, too
                flat.write_back(self._link)
        # A view of an empty storage would be a segmentation fault on a CPU, and silently wrong once it is refilled. So
        # the memory is left to those who hold views, and new memory goes into the slot.
        if lends and self.lent is None:
            self.lent, self._lent_views = self.storage, [flat.views for flat in self.flats]
        if lends or self._count_references() > self._references:
            self._bind(allocate(self.slot.nbytes, self.storage.device))
        detach(self.storage, self.slot)
        slot, self.slot, self.state = self.slot, None, State.AT_REST
        for flat, views, indices in zip(self.flats, self._lent_views, exposed, strict=lends):
            for index, view in enumerate(views):
                flat.unbind(index, view)
            # Whoever has asked for the data of a parameter may yet write to it; of a frozen one nobody notes that.
            flat.exposed.update(indices if flat.layout.trainable else range(len(views)))
            flat.watch()
        return slot

    def take_back(self) -> None:
        """Let the parameters lie in the unit's own storage again, with what others wrote to them meanwhile."""
        self.take_changes()
        self.lent, self._lent_views = None, []
        for flat in self.flats:
            for index in sorted(flat.unbound):
                flat.rebind(index)
            flat.watch()
