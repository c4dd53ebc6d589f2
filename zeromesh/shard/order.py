"""In which order units are used, as all ranks see it, and what their backwards will need."""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence

from torch import nn

from zeromesh.shard.unit import Unit

FAR = 1 << 30
"""A position that is never reached."""

BLIND = (nn.Embedding,)
"""Modules whose backward does not look at their parameters: an embedding's needs the indices only."""


class Need(enum.IntEnum):
    """What the backward of a unit's forward needs; of several answers the largest counts."""

    UNKNOWN = -1
    NO_BACKWARD = 0
    """No gradient reaches it: what it computes with is frozen."""
    BACKWARD = 1


class Order:
    """The order in which units are used, and what this rank skipped of it.

    Attributes:
        canonical: the order of first use that all ranks have agreed on: that of registration at first.
        needs: by unit index, what the ranks have agreed on that its backward needs.
        forward: forwards since the last backward, in order of their beginnings, those of skipped units included.
        last_forward: the same before the last backward.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.canonical: list[int] = [unit.index for unit in units]
        self.first_use: dict[int, int] = {}
        self.forward: list[int] = []
        self.last_forward: list[int] = []
        self.needs = dict.fromkeys(self.canonical, Need.BACKWARD)
        self._looks = {unit.index for unit in units if type(unit.module) not in BLIND}
        self._observed: dict[int, Need] = {}
        self._seen: set[int] = set()
        self._done: list[int] = []
        self._before = 0

    def begin_pass(self) -> None:
        """The model's forward begins."""
        self._seen.clear()

    def use(self, index: int) -> list[int]:
        """A unit's forward begins; what should have come before it and did not."""
        skipped: list[int] = []
        if index not in self._seen:
            before = self.canonical[: self.canonical.index(index)]
            skipped = [other for other in before if other not in self._seen]
        self._seen.update(skipped)
        self._seen.add(index)
        self.forward.extend([*skipped, index])
        # What was skipped counts, so that positions mean the same on ranks that skip different units.
        self.first_use.setdefault(index, self._before + len(self.forward))
        return skipped

    def begin_inside(self, inside: Sequence[int]) -> None:
        """The forward of a unit that encloses these begins."""
        self._seen.difference_update(inside)

    def end_inside(self, inside: Collection[int]) -> list[int]:
        """It ends; those that it did not use."""
        rest = [index for index in self.canonical if index in inside and index not in self._seen]
        self.forward.extend(rest)
        self._seen.update(rest)
        return rest

    def end_pass(self) -> list[int]:
        """The model's forward ends; the units that it did not use."""
        return self.end_inside(self.canonical)

    def done(self, index: int, graph: bool | None = None) -> None:
        """A unit's forward ends; ``graph`` says whether it left one, None that this rank skipped it."""
        self._done.append(index)
        need = Need.UNKNOWN if graph is None else Need.BACKWARD if graph else Need.NO_BACKWARD
        self._observed[index] = max(need, self._observed.get(index, Need.UNKNOWN))

    def backward(self) -> list[int]:
        """The order in which the units' backwards begin: the reverse of the ends of their last forwards."""
        latest_first = dict.fromkeys(reversed(self._done))
        return [index for index in latest_first if self.needs[index] > Need.NO_BACKWARD]

    def fetched(self, backward: Sequence[int]) -> list[int]:
        """Those whose parameters the backward looks at."""
        return [index for index in backward if index in self._looks and self.needs[index] is Need.BACKWARD]

    def expected(self) -> list[int]:
        """What a forward and its backward will probably fetch, in order."""
        before = self.last_forward or self.canonical
        return [*before, *self.fetched(list(reversed(before)))]

    def end_backward(self) -> None:
        """The forwards so far are done with."""
        self.last_forward = self.forward or self.last_forward
        self._before += len(self.forward)
        self.forward, self._done = [], []

    def report(self) -> list[float]:
        """This rank's first uses since the last agreement, and observed needs, by ascending unit index."""
        indices = sorted(self.canonical)
        first = [float(-self.first_use.get(index, FAR)) for index in indices]
        return [*first, *(float(self._observed.get(index, Need.UNKNOWN)) for index in indices)]

    def agree(self, largest: Sequence[float]) -> None:
        """Take the elementwise largest of all ranks' reports as what is the case."""
        indices = sorted(self.canonical)
        first = dict(zip(indices, largest[: len(indices)], strict=True))
        before = {index: place for place, index in enumerate(self.canonical)}
        self.canonical.sort(key=lambda index: (-first[index], before[index]))
        for index, need in zip(indices, largest[len(indices) :], strict=True):
            if need > Need.UNKNOWN:
                self.needs[index] = Need(int(need))
        self._observed.clear()
        self._before = 0
        self.first_use.clear()
