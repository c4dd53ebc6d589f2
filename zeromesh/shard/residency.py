"""Which units are in slots: fetch, evict, prefetch.

Every decision here follows from the sequence of events alone (a unit's forward begins, the gradient of its output
arrives), which is the same on all ranks, because fetching is a collective. A rank that does not use a unit the others
use still takes part: ``Order`` fills in the events that it skipped.

Which unit to evict: the one whose next use is farthest (Belady). The next uses are known, since a backward uses the
units in the reverse order of the forward before it, and a forward mostly repeats the one before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zeromesh.dist.mesh import Mesh
from zeromesh.shard.slots import Pool
from zeromesh.shard.unit import State, Unit

FAR = 1 << 30


class Order:
    """The order in which units are used, and what this rank skipped of it.

    ``canonical`` is the order of first use that all ranks have agreed on: that of registration at first.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.canonical: list[int] = [unit.index for unit in units]
        self.first_use: dict[int, int] = {}
        self.forward: list[int] = []
        self.last_forward: list[int] = []
        self._seen: set[int] = set()
        self._done: list[int] = []

    def begin_pass(self) -> None:
        """The model's forward begins."""
        self._seen.clear()

    def use(self, index: int) -> list[int]:
        """A unit's forward begins; what should have come before it and did not."""
        self.first_use.setdefault(index, len(self.first_use))
        skipped: list[int] = []
        if index not in self._seen:
            before = self.canonical[: self.canonical.index(index)]
            skipped = [other for other in before if other not in self._seen]
        self._seen.update(skipped)
        self._seen.add(index)
        self.forward.extend([*skipped, index])
        return skipped

    def end_pass(self) -> list[int]:
        """The model's forward ends; the units that it did not use."""
        rest = [index for index in self.canonical if index not in self._seen]
        self.forward.extend(rest)
        self._seen.update(rest)
        return rest

    def done(self, index: int) -> None:
        """A unit's forward ends."""
        self._done.append(index)

    def backward(self) -> list[int]:
        """The order in which the units' backwards begin: the reverse of the ends of their last forwards."""
        return list(dict.fromkeys(reversed(self._done)))

    def end_backward(self) -> None:
        """The forwards so far are done with."""
        self.last_forward = self.forward or self.last_forward
        self.forward, self._done = [], []

    def agree(self, positions: Sequence[float]) -> None:
        """Take the ranks' earliest first uses (by unit index of ``canonical``'s set, sorted) as the order."""
        rank_of = {index: place for place, index in enumerate(self.canonical)}
        by_index = dict(zip(sorted(self.canonical), positions, strict=True))
        self.canonical.sort(key=lambda index: (by_index[index], rank_of[index]))
        self.first_use.clear()

    def positions(self) -> list[float]:
        """This rank's first uses since the last agreement, by ascending unit index; infinite where unused."""
        return [float(self.first_use.get(index, FAR)) for index in sorted(self.canonical)]


class Residency:
    """Brings units into slots and evicts them.

    Args:
        root: always in memory while the model computes; it has a slot of its own.
        units: all others.
        pool: their slots.
        root_pool: the root's slot.
    """

    def __init__(self, root: Unit, units: Sequence[Unit], pool: Pool, root_pool: Pool, mesh: Mesh) -> None:
        self._root = root
        self._units = {unit.index: unit for unit in units}
        self._pool = pool
        self._root_pool = root_pool
        self._mesh = mesh
        self._active: list[Unit] = []
        self._backward: set[Unit] = set()
        self._kept: set[Unit] = set()
        self._plan: list[int] = []
        self._position = 0
        self.on_change = lambda unit, here: None

    # Events.

    def plan(self, upcoming: Iterable[int]) -> None:
        """What will be used next, in order."""
        self._plan = list(upcoming)
        self._position = 0

    def enter(self, unit: Unit) -> None:
        """The unit's forward begins: it is needed now and stays until ``leave``."""
        self._active.append(unit)
        self.need(unit)

    def touch(self, unit: Unit) -> None:
        """One of its parameters is used outside the unit's forward: the unit stays as long as what uses it."""
        if self._active:
            self.enter(unit)
        else:
            self._backward.add(unit)
            self.need(unit)

    def leave(self, unit: Unit) -> None:
        """The unit's forward ended, or raised; so has every use inside it."""
        while self._active and self._active.pop() is not unit:
            pass

    def enter_backward(self, unit: Unit) -> None:
        """The gradient of the unit's output arrived: units used after it are done with."""
        self._backward = {unit} | unit.ancestors
        self.need(unit)

    def leave_backward(self) -> None:
        """The backward is over."""
        self._backward.clear()

    def keep(self, unit: Unit) -> None:
        """Do not evict the unit before the next update."""
        self._kept.add(unit)

    def need(self, unit: Unit) -> None:
        """Have the unit's parameters in memory when this returns, and the next ones on their way."""
        self._advance(unit)
        self._fetch(unit)
        if unit.state is State.FETCHING:
            unit.finish_fetch()
            self.on_change(unit, True)
        self._prefetch()

    # Decisions.

    def _advance(self, unit: Unit) -> None:
        distance = self._distance(unit)
        if distance != FAR:
            self._position += distance + 1

    def _fetch(self, unit: Unit) -> None:
        if unit.state is not State.HOME:
            return
        slot = None
        if unit.sharded:
            pool = self._root_pool if unit is self._root else self._pool
            slot = pool.take(unit.nbytes)
            while slot is None and (victim := self._victim(unit.nbytes, FAR)) is not None:
                self.evict(victim)
                slot = pool.take(unit.nbytes)
            slot = slot or pool.grow(unit.nbytes)
        unit.begin_fetch(self._mesh, slot)

    def _prefetch(self) -> None:
        if not self._root.sharded:
            return
        for ahead, index in enumerate(self._plan[self._position :]):
            unit = self._units[index]
            if unit.state is not State.HOME or not unit.sharded:
                continue
            slot = self._pool.take(unit.nbytes)
            if slot is None:
                victim = self._victim(unit.nbytes, ahead)
                if victim is None:
                    return
                self.evict(victim)
                slot = self._pool.take(unit.nbytes)
                assert slot is not None
            unit.begin_fetch(self._mesh, slot)

    def _victim(self, nbytes: int, sooner_than: int) -> Unit | None:
        """The unit that is needed last, and later than ``sooner_than`` uses from now; None if all are needed."""
        pinned = {self._root, *self._active, *self._backward, *self._kept}
        pinned |= {ancestor for unit in self._active for ancestor in unit.ancestors}
        best, farthest = None, sooner_than if sooner_than != FAR else -1
        for unit in self._units.values():
            if unit.slot is None or unit in pinned or unit.slot.nbytes < nbytes:
                continue
            distance = self._distance(unit)
            if distance > farthest:
                best, farthest = unit, distance
        return best

    def _distance(self, unit: Unit) -> int:
        try:
            return self._plan.index(unit.index, self._position) - self._position
        except ValueError:
            return FAR

    def evict(self, unit: Unit) -> None:
        """Give up the unit's slot."""
        if unit.state is State.FETCHING:
            unit.finish_fetch()
        else:
            self.on_change(unit, False)
        pool = self._root_pool if unit is self._root else self._pool
        pool.give(unit.evict())

    def evict_all(self) -> None:
        """Give up every slot: the parameters are about to change, or nobody will need them for a while."""
        self._kept.clear()
        for unit in (self._root, *self._units.values()):
            if unit.slot is not None:
                self.evict(unit)

    @property
    def active(self) -> bool:
        """Whether some unit's forward or the backward is going on."""
        return bool(self._active or self._backward)
