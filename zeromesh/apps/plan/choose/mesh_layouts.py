"""Layouts that wait in a search: all of one mesh, and groups of them that share a placement row."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from math import inf

from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
from zeromesh.apps.plan.choose.space import LayoutSpace, PlanRequest
from zeromesh.apps.plan.machine.cluster import Machine
from zeromesh.apps.plan.predict.lower_bounds import least_memory


def price_of(machine: Machine, seconds: float, tokens: float) -> float:
    """Return the price per million tokens of a step; in device-hours where a node has no price."""
    priced = sum(node.price * count for node, count in machine.nodes)
    return seconds / 3600 / (tokens / 1e6) * (priced or machine.devices)


class MeshLayouts:
    """All layouts of one mesh on one machine: each of its rows, groups and slots with each of its runs."""

    def __init__(self, space: LayoutSpace, share: float, sizes: tuple[int, int, int, int]) -> None:
        self.space, self.sizes = space, sizes
        self.limit = share * least_memory(space.machine)  # bytes of a device that a layout may take
        bound, request, plain = space.bound, space.request, space.plain(*sizes)
        # What depends on the run alone is computed once for all rows.
        self.runs = [(bound.compute(run), bound.activations(run), run) for run in space.runs(plain)]
        self.bases = [(bound.states(base), base) for base in space.bases(plain)]
        self.sizes_kept = sorted(activations for _, activations, _ in self.runs)
        room = [self.limit - states for states, _ in self.bases]
        self.too_large = sum(len(self.runs) - bisect_right(self.sizes_kept, left) for left in room)
        # Of a step of any of the layouts that may fit.
        self.seconds = min((compute for compute, activations, _ in self.runs if activations <= max(room)), default=inf)
        self.price = 1.0
        if request.goal == "cost":
            self.price = price_of(space.machine, 1.0, request.batch * request.sequence)
        self.least = self.seconds * self.price  # score of any of them
        if request.goal == "memory" and self.seconds < inf:
            self.least = min(states for states, _ in self.bases) + self.sizes_kept[0]

    def lacking(self, request: PlanRequest) -> Iterator[tuple[float, ParallelLayout]]:
        """Yield, of each row, the layout that lacks least by the bound, with the bytes."""
        runs, limit = sorted(self.runs, key=lambda run: run[1]), self.limit
        for states, base in self.bases:
            lacks = (
                (states + activations - limit, joined(base, run))
                for _, activations, run in runs
                if states + activations > limit
            )
            yield from islice((entry for entry in lacks if not request.accepts or request.accepts(entry[1])), 1)


@dataclass
class LayoutGroup:
    """Layouts of one mesh and row, by their bounds."""

    space: LayoutSpace
    # Expected score, bound of the score, and the layout in two parts: mesh and row, and all else.
    waiting: list[tuple[float, float, ParallelLayout, ParallelLayout]]
    next: int = 0
    ratio: float = 1.0  # of a computed score to what was expected

    def layout(self, place: int) -> ParallelLayout:
        """Return the layout at a place; it is put together now, since most are never asked for."""
        return joined(*self.waiting[place][2:])

    def take(self) -> ParallelLayout:
        """Return the next layout, which waits no more."""
        self.next += 1
        return self.layout(self.next - 1)

    def compare(self, score: float, expected: float) -> float:
        """Return the ratio of a computed score to what was expected, which counts for those that wait."""
        self.ratio = score / max(expected, 1e-12)
        return self.ratio

    def has_better(self, best: float) -> bool:
        """Pass over those that cannot be better; return whether others wait."""
        while self.next < len(self.waiting) and self.waiting[self.next][1] >= best:
            self.next += 1
        return self.next < len(self.waiting)


def joined(base: ParallelLayout, run: ParallelLayout) -> ParallelLayout:
    """Return a layout with the groups, the row and the slots of ``base``, and all else of ``run``."""
    return replace(run, data=base.data, replicate=base.replicate, row=base.row, parameter_slots=base.parameter_slots)
