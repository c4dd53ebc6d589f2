"""Order of use of units, as all ranks see it, and the needs of their backwards."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from zeromesh.base.substitution import computes_as
from zeromesh.shard.parameters.fetch_order import FAR
from zeromesh.shard.parameters.unit import Unit

BLIND = (nn.Embedding,)  # the backward does not look at the parameters: an embedding's needs the indices only


class Need(enum.IntEnum):
    """Need of a unit after its forward; the largest of several answers counts."""

    UNKNOWN = -1
    NO_BACKWARD = 0  # no gradient reaches it: what it computes with is frozen
    BACKWARD = 1


class Pass:
    """One forward of the model. Unit indices, those of skipped units included."""

    def __init__(self, number: int = 0) -> None:
        self.number = number  # of forwards before it
        self.begun: list[int] = []  # in the order in which their forwards began
        self.ended: list[int] = []  # in the order in which they ended
        self.used: set[int] = set()  # those that this rank did not skip
        self.outside: set[int] = set()  # units whose parameters were used outside of their forwards


class Walk:
    """Progress of a pass's backward through its expected steps."""

    def __init__(self, steps: Sequence[int], used: Collection[int]) -> None:
        self.steps = tuple(steps)
        self._used = used
        self._position = 0
        self._left = Counter(steps)

    def pending(self, index: int) -> bool:
        """Return whether the backward of a call of ``index`` is still to come."""
        return self._left[index] > 0

    def reach(self, index: int) -> Iterator[int]:
        """The backward of a call of ``index`` begins; one by one, the steps before it that this rank has left out."""
        if self.pending(index):
            while (step := self._take()) != index:
                yield step

    def approach(self, index: int) -> Iterator[int]:
        """The backward of ``index`` is near; if it is the next that this rank takes itself, the steps before it."""
        coming = range(self._position, len(self.steps))
        noticed = next((position for position in coming if self.steps[position] in self._used), None)
        if noticed is not None and self.steps[noticed] == index:
            while self._position < noticed:
                yield self._take()

    def rest(self) -> Iterator[int]:
        """The backward ends; one by one, the steps that this rank has left out."""
        while self._position < len(self.steps):
            yield self._take()

    def _take(self) -> int:
        step = self.steps[self._position]
        self._position += 1
        self._left[step] -= 1
        return step


class Order:
    """The order in which units are used, and what this rank skipped of it."""

    def __init__(self, units: Sequence[Unit]) -> None:
        # The order of first use that all ranks have agreed on: at first that of registration, the same on all of them.
        self.canonical: list[int] = [unit.index for unit in units]
        self.needs = dict.fromkeys(self.canonical, Need.BACKWARD)
        self._looks = {unit.index for unit in units if not any(computes_as(unit.module, kind) for kind in BLIND)}
        self.current = Pass()  # the latest pass whose backward may come
        # Forwards since the last backward, in order of their beginnings, those of skipped units included.
        self.forward: list[int] = []
        self.last_forward: list[int] = []  # the same before the last backward
        # Of the units that are used, where only a part of the model computes, as one of several stages of a pipeline
        # does; None where all of it does. The others have not been skipped.
        self.part: frozenset[int] | None = None
        self.again: frozenset[int] = frozenset()  # of the part, those that another one uses again before the update
        self.evaluates = False  # no backward comes, though there may be graphs
        self._recorded = True  # a backward of the forward that runs may come
        self._before = self.current
        self._passes = 1
        self._seen: set[int] = set()  # in the forward that runs
        self._passed = 0  # all units at the places before it, in the canonical order, have been seen
        self._place_of = {index: place for place, index in enumerate(self.canonical)}
        self._places: dict[int, int] = {}  # of first uses since the last agreement; less by `FAR` where skipped
        self._observed: dict[int, Need] = {}  # since the last agreement
        self._reported: tuple[dict[int, int], dict[int, Need], list[float]] | None = None  # places, needs, report
        self._settled: Sequence[float] = ()  # what was agreed on last

    @contextmanager
    def of_stage(self, part: frozenset[int] | None, again: frozenset[int], trains: bool) -> Iterator[None]:
        """Compute one pipeline stage in this context."""
        self.part, self.again, self.evaluates = part, again, not trains
        try:
            yield
        finally:
            self.part, self.again, self.evaluates = None, frozenset(), False

    def is_present(self, index: int) -> bool:
        """Return whether a unit is of the part of the model that computes."""
        return self.part is None or index in self.part

    def begin_pass(self, recorded: bool) -> None:
        """The model begins to compute; ``recorded`` if a backward may come."""
        self._seen.clear()
        self._passed = 0
        self._recorded = recorded
        if recorded:
            self._before, self.current = self.current, Pass(self._passes)
            self._passes += 1

    def has_seen(self, index: int) -> bool:
        """Return whether the forward that runs has used or passed the unit."""
        return index in self._seen

    def use(self, index: int, outside: bool = False) -> list[int]:
        """A unit's forward begins, or it is used ``outside`` of that; returns what came before on other ranks only."""
        # Other ranks may have used these, for which this one takes part in the fetch, and reduces zeros later.
        skipped: list[int] = []
        if index not in self._seen:
            while self.canonical[self._passed] in self._seen:
                self._passed += 1
            before = self.canonical[self._passed : self._place_of[index]]
            skipped = [other for other in before if other not in self._seen and self.is_present(other)]
        for other in skipped:
            self._note(other, used=False)
        self._note(index, used=True)
        if outside and self._recorded:
            self.current.outside.add(index)
        return skipped

    def end_pass(self, forward: bool) -> list[int]:
        """The model has computed; the units that it did not use. Methods other than ``forward`` may use none at all."""
        if not (forward or self._seen):  # a method that used no unit is no pass whose backward may come
            self.current = self._before if self._recorded else self.current
            return []
        return self.end_inside(self.canonical)

    def begin_inside(self, inside: Collection[int]) -> None:
        """Begin the forward of a unit that encloses these."""
        if inside:
            self._seen.difference_update(inside)
            self._passed = min(self._passed, min(self._place_of.get(index, self._passed) for index in inside))

    def end_inside(self, inside: Collection[int]) -> list[int]:
        """End the forward of a unit that encloses these; return those that it did not use."""
        places = sorted(self._place_of[i] for i in inside if i not in self._seen and i in self._place_of)
        rest = [index for index in map(self.canonical.__getitem__, places) if self.is_present(index)]
        for index in rest:
            self._note(index, used=False)
        return rest

    def _note(self, index: int, used: bool) -> None:
        self._seen.add(index)
        if not (self._recorded and self.is_present(index)):
            return
        if used:
            self.current.used.add(index)
        place = len(self.current.begun)
        self.current.begun.append(index)
        self.forward.append(index)
        if used and self._places.get(index, -1) < 0:
            self._places[index] = place
        self._places.setdefault(index, place - FAR)

    def done(self, index: int, graph: bool | None = None) -> None:
        """A unit's forward ends; ``graph`` says whether it left one, None that this is not known."""
        if self._recorded and self.is_present(index):
            self.current.ended.append(index)
            need = Need.UNKNOWN if graph is None else Need.BACKWARD if graph else Need.NO_BACKWARD
            self._observed[index] = max(need, self._observed.get(index, Need.UNKNOWN))

    def backward(self, forward: Pass) -> Walk:
        """The order in which the units' backwards begin: the reverse of the ends of their forwards."""
        steps = [index for index in reversed(forward.ended) if self.needs[index] > Need.NO_BACKWARD]
        return Walk(steps, forward.used)

    def fetched(self, backward: Sequence[int]) -> list[int]:
        """Those whose parameters the backward looks at."""
        return [index for index in backward if index in self._looks and self.needs[index] is Need.BACKWARD]

    def expected(self, backward: bool) -> list[int]:
        """Return the units that a forward, and its backward if one comes, will probably fetch, in order."""
        forward = [i for i in self.last_forward if self.is_present(i)] or [*filter(self.is_present, self.canonical)]
        return [*forward, *self.fetched(list(reversed(forward)))] if backward else forward

    def end_backward(self) -> None:
        """The forwards so far are done with."""
        self.last_forward = self.forward or self.last_forward
        self.forward = []

    def report(self) -> list[float]:
        """Return this rank's first uses since the last agreement and observed needs, by ascending unit index."""
        if self._reported is None or self._reported[:2] != (self._places, self._observed):
            indices = sorted(self.canonical)
            places = {index: place - FAR for place, index in enumerate(self.canonical)} | self._places
            first = [float(places[index]) for index in indices]
            report = [*first, *(float(self._observed.get(index, Need.UNKNOWN)) for index in indices)]
            self._reported = dict(self._places), dict(self._observed), report
        return self._reported[2]

    def agree(self, largest: Sequence[float]) -> None:
        """Take the elementwise largest of all ranks' reports as what is the case."""
        self._places.clear()
        self._observed.clear()
        if largest == self._settled:  # the order has been that since
            return
        self._settled, self._reported = largest, None
        # The largest of places counts: a rank that has not yet learnt of some units counts too few of them.
        indices = sorted(self.canonical)
        first = dict(zip(indices, largest[: len(indices)], strict=True))
        self.canonical.sort(key=lambda index: (first[index] % FAR, self._place_of[index]))
        self._place_of = {index: place for place, index in enumerate(self.canonical)}
        self._passed = 0
        for index, need in zip(indices, largest[len(indices) :], strict=True):
            if need > Need.UNKNOWN:
                self.needs[index] = Need(int(need))
