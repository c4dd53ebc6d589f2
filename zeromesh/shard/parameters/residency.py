"""Residency of units in slots: fetch, evict, prefetch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from zeromesh.base.spans import span
from zeromesh.comm.mesh import Mesh
from zeromesh.shard.parameters.fetch_order import FAR, distance_to, farthest
from zeromesh.shard.parameters.slots import Pool, Slot
from zeromesh.shard.parameters.unit import State, Unit


class Residency:
    """Loads units into slots and evicts them."""

    # Fetching is a collective, so every decision follows from the sequence of events alone (a unit's forward begins,
    # the gradient of its output arrives), which is the same on all ranks: `Order` fills in the events that a rank
    # skipped.

    def __init__(
        self,
        root: Unit,
        units: Sequence[Unit],
        pool: Pool,
        root_pool: Pool,
        mesh: Mesh,
        on_change: Callable[[Unit, bool], None],
        read_ahead: Callable[[Iterator[Unit]], None] | None = None,
    ) -> None:
        # The unit that a storage belongs to, by the storage's address.
        self.unit_of = {unit.storage._cdata: unit for unit in (root, *units)}
        self._root = root  # always in memory while the model computes; it has a slot of its own
        self._units = {unit.index: unit for unit in units}  # all others
        self._pool = pool
        self._root_pool = root_pool
        self._mesh = mesh
        self.active: list[Unit] = []  # whose forward is going on, in order
        self._backward: set[Unit] = set()  # whose backward is going on, with those around and inside of them
        # Whose parameters are used outside of their forward: their memory stays for that until the model has computed,
        # however the slots are used, which is to depend on what all ranks do.
        self.lending: set[Unit] = set()
        self._held: set[Unit] = set()  # that the current node of the graph looks at
        self._node = -1
        self._in_slots: dict[int, Unit] = {}  # the units that have a slot, but for the root
        self._plan: list[int] = []  # the units that will be used, in order, the next one at `_position`
        self._position = 0
        # Called with a unit and whether its parameters may be used from now on: they are in memory, and stay.
        self._on_change = on_change
        self._read = read_ahead

    # Events.

    def plan(self, upcoming: Iterable[int]) -> None:
        """Units that will be used next, in order."""
        self._plan = list(upcoming)
        self._position = 0
        self._read_ahead()

    def enter(self, unit: Unit) -> None:
        """The unit's forward begins: it is needed now and stays until ``leave``."""
        self.active.append(unit)
        if unit not in self.lending:
            self._load(unit)

    def open(self, unit: Unit) -> None:
        """The unit's parameters may be used: it is fetched when the first is, and stays until ``leave``."""
        self.active.append(unit)

    def touch(self, unit: Unit) -> None:
        """One of its parameters is used outside the unit's forward: the unit stays as long as what uses it."""
        if not self.active:
            self._backward.add(unit)
        elif unit not in self.active:
            self.active.append(unit)
        self._load(unit)

    def lend(self, unit: Unit) -> None:
        """Let this rank use the unit, which is in memory or on its way, however long it stays there; no messages."""
        if unit.state is State.FETCHING:
            unit.finish_fetch()
        self._on_change(unit, True)
        self.lending.add(unit)

    def take_back(self, units: Collection[Unit] | None = None) -> None:
        """The model has computed: nobody uses these units, or any, outside of their places in the order any more."""
        units = [*(self.lending if units is None else units)]
        self.lending.difference_update(units)
        for unit in units:
            unit.take_back()
            if unit.state is State.AT_REST:
                self._on_change(unit, False)
            else:
                self._hide(unit)

    def leave(self, unit: Unit) -> None:
        """The unit's forward ended, or raised; so has every use inside it."""
        while self.active:
            other = self.active.pop()
            self._hide(other)
            if other is unit:
                break

    def enter_backward(self, unit: Unit, needed: bool = True, is_done: Callable[[Unit], bool] | None = None) -> None:
        """Let units go that were used after this one, as the gradient of its output arrived.

        ``is_done`` says whether a unit's parameters are no longer needed before the update; None: all are.
        """
        # A gradient of an output arrives when every node that was created after it has run. Units inside of this one
        # stay all the same: their output may be its own.
        before, self._held = self._backward, set()
        self._backward = {unit, *unit.ancestors, *(other for other in before if unit in other.ancestors)}
        for other in before:
            self._hide(other)
        pinned = self._pinned()
        if is_done is not None:  # an update will make their parameters worthless: their memory is free for gradients
            for other in [other for other in self._in_slots.values() if other not in pinned and is_done(other)]:
                self.evict(other)
        if needed:
            self._load(unit)
        else:
            self._advance(unit)
            self._prefetch()
        # Nothing more will be fetched before the update: the memory of free slots goes to gradients.
        ends = is_done is not None and unit.sharded
        if ends and all(self._units[index].state is not State.AT_REST for index in self._plan[self._position :]):
            self._pool.trim()

    def hold(self, unit: Unit, node: int) -> None:
        """Node number ``node`` of the graph looks at a view of the unit's parameters, and maybe at other units'."""
        if node != self._node:  # another node runs, so the one before has read its views
            self._node, self._held = node, set()
        self._held.add(unit)
        if unit.state is not State.FETCHED and unit not in self.lending:
            self.need(unit)

    def leave_backward(self) -> None:
        """The backward is over."""
        before, self._backward, self._held = self._backward, set(), set()
        for unit in before:
            self._hide(unit)

    def release(self, unit: Unit) -> None:
        """Evict the unit if nothing needs it now."""
        if unit.slot is not None and unit not in {*self.active, *self._backward, *self._held}:
            self.evict(unit)

    def shrink(self) -> None:
        """Free the slots beyond the budget that nothing needs now."""
        self._pool.shrink()
        self._root_pool.shrink()

    def need(self, unit: Unit) -> None:
        """Bring the unit's parameters into memory, and begin to fetch those of the next units."""
        self._advance(unit)
        self._fetch(unit)
        if unit.state is State.FETCHING:
            unit.finish_fetch()
            if not unit.sharded:
                self._on_change(unit, True)
        self._prefetch()

    def _load(self, unit: Unit) -> None:
        self.need(unit)
        self._on_change(unit, True)

    def _hide(self, unit: Unit) -> None:
        """Let the unit be evicted unless something needs it; later users must ask for it."""
        if unit.sharded and unit not in self._pinned() and unit not in self.lending:
            self._on_change(unit, False)

    def _pinned(self) -> set[Unit]:
        """Return the units that must stay: in use, or around a unit whose forward is going on."""
        pinned = {self._root, *self.active, *self._backward, *self._held}
        return pinned | {ancestor for unit in self.active for ancestor in unit.ancestors}

    # Decisions.

    def _advance(self, unit: Unit) -> None:
        distance = distance_to(self._plan, unit.index, self._position)
        if distance != FAR:
            self._position += distance + 1

    def _fetch(self, unit: Unit) -> None:
        if unit.state is not State.AT_REST:
            return
        slot = None
        if unit.sharded:
            pool = self._root_pool if unit is self._root else self._pool
            # Where everything is pinned: rather more memory than a deadlock.
            slot = self._slot(pool, unit.nbytes, FAR) or pool.grow(unit.nbytes)
            if unit is not self._root:
                self._in_slots[unit.index] = unit
        unit.begin_fetch(self._mesh, slot)

    def _slot(self, pool: Pool, nbytes: int, sooner_than: int) -> Slot | None:
        """Return a slot, for which units that are used later than ``sooner_than`` uses from now are evicted."""
        slot = pool.take(nbytes)
        while slot is None and (victim := self._victim(nbytes, sooner_than)) is not None:
            self.evict(victim)
            slot = pool.take(nbytes)
        return slot

    def _prefetch(self) -> None:
        self._read_ahead()
        if not self._root.sharded:
            return
        for distance, index in enumerate(self._plan[self._position :]):
            unit = self._units[index]
            if unit.state is not State.AT_REST or not unit.sharded:
                continue
            slot = self._slot(self._pool, unit.nbytes, distance)
            if slot is None:
                return  # all others are used sooner than this one
            self._in_slots[index] = unit
            unit.begin_fetch(self._mesh, slot)
            self._read_ahead()

    def _read_ahead(self) -> None:
        """Say what is not in memory, nor on its way, and will be used; nothing where no plan says what."""
        if self._read is not None:
            units = [self._root, *(self._units[index] for index in self._plan[self._position :])] if self._plan else []
            self._read(unit for unit in units if unit.state is State.AT_REST)

    def _victim(self, nbytes: int, sooner_than: int) -> Unit | None:
        """The unit that is needed last, and later than ``sooner_than`` uses from now; None if all are needed."""
        pinned = self._pinned()
        evictable = (
            index
            for index, unit in sorted(self._in_slots.items())
            if unit.slot is not None and unit not in pinned and unit.slot.nbytes >= nbytes
        )
        index = farthest(self._plan, self._position, evictable, sooner_than)
        return None if index is None else self._units[index]

    def evict(self, unit: Unit) -> None:
        """Give up the unit's slot. Views of its parameters that somebody holds stay good."""
        if unit.state is State.FETCHING:
            unit.finish_fetch()
        lends = unit in self.lending
        if not lends:
            self._on_change(unit, False)  # first: from here on a use of its parameters asks for them
        pool = self._root_pool if unit is self._root else self._pool
        self._in_slots.pop(unit.index, None)
        before = unit.storage._cdata  # the unit gets another storage if somebody holds views of this one
        # On CUDA the unit's last kernels may still run. The slot's next writer waits for the current stream, which has
        # been given all of them.
        with span("evict", unit.name or "(root)"):
            pool.give(unit.evict(lends))
        self.unit_of[unit.storage._cdata] = self.unit_of.pop(before)

    def evict_all(self) -> None:
        """Give up every slot and its memory: parameters are about to change, or nobody needs them for a while."""
        for unit in (self._root, *(unit for _, unit in sorted(self._in_slots.items()))):
            if unit.slot is not None:
                self.evict(unit)
        self._pool.trim()
        self._root_pool.trim()
