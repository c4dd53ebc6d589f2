"""Search for the best layout of a model on a machine: enumerate, leave out by bounds, compute the rest, rank.

Layouts wait in groups that share a mesh and a placement row, each group in the order of expected times. Groups are
served by the expected time of their next layout times the ratio of computed to expected time that the group has shown.
The search ends when no layout's bound is below the best time: then no other layout can be better. It also ends after a
number of layouts, which is said.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from zeromesh.model.placement import PlacementRow, Tier
from zeromesh.plan.bounds import best_rate, least_memory, slowest
from zeromesh.plan.cost import CostSource, Recompute
from zeromesh.plan.fit import MEMORY_MARGIN, lacking
from zeromesh.plan.layout import ParallelLayout
from zeromesh.plan.machine import Machine
from zeromesh.plan.memory import RankMemory, memory_of
from zeromesh.plan.space import LARGEST_MICRO_BATCH, LayoutSpace, PlanRequest
from zeromesh.plan.time import StepTime, time_of

TIGHT = 0.9  # share of the device's memory from which a layout is nearly full
SHOWN = 8
ALIKE = 0.02  # layouts whose scores differ by less are alike, and the simplest of them is the best


class SearchEffort(NamedTuple):
    """Numbers of layouts after which a search ends, whether or not its result is proven."""

    computed: int = 200  # layouts whose time is computed
    tried: int = 140  # of them, before others are left out whose bounds promise too little
    weighed: int = 1200  # layouts whose memory is computed
    shown: int = SHOWN  # kinds for the table


Memory = Callable[[CostSource, int, ParallelLayout, Machine | None], list[RankMemory]]
Timing = Callable[[CostSource, int, ParallelLayout, Machine], StepTime]


@dataclass(frozen=True)
class PlanCandidate:
    """One layout with its memory and time."""

    layout: ParallelLayout
    machine: Machine
    sequence: int
    memory: tuple[RankMemory, ...]
    time: StepTime

    @property
    def fullest(self) -> RankMemory:
        """The pipeline rank whose device needs most."""
        return max(self.memory, key=lambda rank: rank.device)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks."""
        return self.layout.samples * self.sequence / self.time.seconds

    @property
    def mfu(self) -> float:
        """Model's operations in parts of the devices' peak; attention counts and recomputation does not."""
        device, width = slowest(self.machine), self.layout.widths.parameter
        return self.time.flops / (self.time.seconds * self.layout.ranks * best_rate(device, width))

    @property
    def price(self) -> float:
        """Price per million tokens; in device-hours where a node has no price."""
        hours = self.time.seconds / 3600 / (self.layout.samples * self.sequence / 1e6)
        priced = sum(node.price * count for node, count in self.machine.nodes)
        return hours * (priced or self.machine.devices)

    @property
    def kind(self) -> tuple[object, ...]:
        """Mesh and placement, by which layouts are told apart in a table."""
        layout, row = self.layout, self.layout.row
        tiers = row.parameter_tier, row.optimizer_tier
        return layout.tensor, layout.context, layout.pipeline, layout.stage, tiers, self.machine.devices

    @property
    def parts(self) -> int:
        """Number of things that a layout does beside computing the model whole on each device."""
        layout, row = self.layout, self.layout.row
        # Each doubling of an axis that shares the model counts.
        axes = (layout.replicate > 1) + sum(
            (s - 1).bit_length() for s in (layout.tensor, layout.context, layout.pipeline)
        )
        tiers = sum(tier is not Tier.DEVICE for tier in (row.parameter_tier, row.optimizer_tier)) + row.split
        runs = (layout.recompute is not Recompute.NONE) + layout.activations_on_host + (layout.schedule != "1f1b")
        # What is nearly full may run out of memory where the prediction is wrong.
        tight = 2 * (bool(self.memory) and self.fullest.device > TIGHT * least_memory(self.machine))
        return axes + tiers + runs + layout.stage + tight

    def score(self, goal: str) -> float:
        """Return the smaller-is-better number of a goal."""
        return {"time": self.time.seconds, "memory": self.fullest.device, "cost": self.price}[goal]


@dataclass
class LayoutCell:
    """All layouts of one placement and one mesh, for a map."""

    bound: float = float("inf")  # seconds, the lowest of all
    seconds: float = float("inf")  # of the best computed layout
    over: float = float("inf")  # bytes that the smallest layout lacks; 0 where one fits
    over_bound: float = float("inf")  # the same by the bound of memory, where nothing was computed

    def weigh(self, over: float) -> None:
        """Note what a layout lacks."""
        self.over = min(self.over, max(0.0, over))

    def time(self, seconds: float) -> None:
        """Note the time of a layout that fits."""
        self.seconds = min(self.seconds, seconds)


@dataclass(frozen=True)
class PlanResult:
    """Layouts that were found, best first, and what was left out."""

    request: PlanRequest
    ranked: tuple[PlanCandidate, ...]
    considered: int  # layouts enumerated
    too_large: int  # left out since their states alone do not fit
    weighed: int  # whose memory was computed
    computed: int  # whose time was computed
    proven: bool  # true if no layout that was left out can be better, by its bound
    nearest: tuple[tuple[ParallelLayout, tuple[RankMemory, ...]], ...] = ()  # those that lack least, if none fits
    cells: dict[tuple[PlacementRow, tuple[int, int, int]], LayoutCell] = field(default_factory=dict)

    @property
    def best(self) -> PlanCandidate | None:
        """The best layout; None if nothing fits."""
        return self.ranked[0] if self.ranked else None

    @property
    def shown(self) -> tuple[PlanCandidate, ...]:
        """The best layout of each kind, at most ``SHOWN``."""
        kinds: dict[tuple[object, ...], PlanCandidate] = {}
        for candidate in self.ranked:
            kinds.setdefault(candidate.kind, candidate)
        return tuple(kinds.values())[:SHOWN]


def machines_for(request: PlanRequest) -> list[Machine]:
    """Return the machines to try: the whole, and for the price also smaller parts of it."""
    machine = request.machine
    found = [machine]
    if request.goal == "cost" and len(machine.nodes) == 1:
        (node, count) = machine.nodes[0]
        while count > 1:
            count = count // 2
            found.append(replace(machine, nodes=((node, count),)))
    return found


def search(
    request: PlanRequest, memory: Memory = memory_of, time: Timing = time_of, effort: SearchEffort | None = None
) -> PlanResult:
    """Return the best layouts for a request; the result does not depend on the speed of this machine.

    Raises:
        ValueError: the batch cannot be shared out to so many devices, with the nearest that can.
    """
    return _Ranking(request, memory, time, effort or SearchEffort()).run()


class _Ranking:
    """The search's state: groups that wait, and what was found."""

    def __init__(self, request: PlanRequest, memory: Memory, time: Timing, effort: SearchEffort) -> None:
        self.request, self.memory, self.time, self.effort = request, memory, time, effort
        self.cells: dict[tuple[PlacementRow, tuple[int, int, int]], LayoutCell] = {}
        self.found: list[PlanCandidate] = []
        self.nearest: list[tuple[float, int, ParallelLayout, ParallelLayout]] = []
        self._near_limit = float("inf")
        self._weighed_near: tuple[float, ParallelLayout, tuple[RankMemory, ...]] | None = None
        self.considered = self.too_large = self.weighed = self.computed = 0
        self._failed: dict[ParallelLayout, int] = {}  # least micro-batch that did not fit, by the rest of the layout
        self._extra: dict[tuple[object, ...], float] = {}  # least bytes beside states, by what is not states

    def run(self) -> PlanResult:
        """Search, and return what was found."""
        searches = [LayoutSpace(self.request, machine) for machine in machines_for(self.request)]
        searches = [one for one in searches if one.meshes()] or _no_batch(self.request, searches[0])
        groups = [group for one in searches for group in self._collect(one)]
        waiting = [(group.waiting[0][0], number) for number, group in enumerate(groups)]
        heapq.heapify(waiting)
        best, least, proven = float("inf"), 0.0, True
        while waiting:
            _, number = heapq.heappop(waiting)
            group = groups[number]
            expected, _, bound, _, _ = group.waiting[group.next]
            # No layout of many did better than expected by more than the least ratio, so this one is not going to.
            if self.computed >= self.effort.tried and expected * least >= best:
                proven = False
                continue
            if self.computed >= self.effort.computed or self.weighed >= self.effort.weighed:
                proven = False
                break
            candidate = None
            if bound < best:
                candidate = self._compute(group.layout(group.next), group.search)
            group.advance()
            if candidate is not None:
                score = candidate.score(self.request.goal)
                group.learn(score / max(expected, 1e-12))
                least = min(least or group.ratio, group.ratio)
                best = min(best, score)
            if group.next < len(group.waiting):
                heapq.heappush(waiting, (group.waiting[group.next][0] * group.ratio, number))
        self._fill(groups)
        ranked = self._ranked()
        nearest = () if ranked else self._near(searches[0].machine)
        return PlanResult(
            self.request, tuple(ranked), self.considered, self.too_large, self.weighed, self.computed, proven,
            nearest, self.cells,
        )  # fmt: skip

    def _ranked(self) -> list[PlanCandidate]:
        """Return what was found, the best first; the best of each kind with its exact time."""
        goal = self.request.goal

        def order(one: PlanCandidate) -> tuple[float, ...]:
            return one.score(goal), one.time.seconds, one.machine.devices

        ranked = sorted(self.found, key=order)
        kinds: dict[tuple[object, ...], PlanCandidate] = {}
        for one in ranked:
            kinds.setdefault(one.kind, one)
        first = [self._exactly(one) for one in list(kinds.values())[: self.effort.shown]]
        if not first:
            return ranked
        first.sort(key=order)
        # The prediction cannot tell layouts that are so near to each other, and users can tell a simple one.
        alike = [one for one in first if one.score(goal) <= first[0].score(goal) * (1 + ALIKE)]
        simplest = min(alike, key=lambda one: one.parts)
        return [simplest, *(one for one in first if one is not simplest)]

    def _fill(self, groups: list[_Group]) -> None:
        """Compute layouts of further kinds for the table, by their bounds."""
        kinds = {(one.kind, one.layout.row) for one in self.found}
        left = sorted((group.waiting[0][0], number) for number, group in enumerate(groups) if not group.next)
        for _, number in left:
            if len(kinds) >= self.effort.shown or self.weighed >= self.effort.weighed * 1.2:
                return
            group = groups[number]
            for place in range(min(6, len(group.waiting))):
                candidate = self._compute(group.layout(place), group.search)
                if candidate is not None:
                    kinds.add((candidate.kind, candidate.layout.row))
                    break

    def _collect(self, one: LayoutSpace) -> list[_Group]:
        """Return the groups of a machine's layouts, without those whose states alone are too large."""
        limit, bound, goal = least_memory(one.machine) * (1 - MEMORY_MARGIN), one.bound, self.request.goal
        groups: dict[tuple[object, ...], _Group] = {}
        for mesh in one.meshes():
            # What depends on the run alone is computed once for all rows of a mesh.
            plain = one.plain(*mesh)
            runs = [(run, bound.compute(run), bound.activations(run)) for run in one.runs(plain)]
            for base in one.bases(plain):
                cell = self.cells.setdefault((replace(base.row, offloaded=1.0), mesh), LayoutCell())
                states = bound.states(base)
                cell.over_bound = min(cell.over_bound, max(0.0, states - limit))
                group = groups.setdefault((mesh, base.data, base.row), _Group(one, []))
                others: dict[int, tuple[float, float]] = {}  # of links and the host, by the number of micro-batches
                for run, compute, activations in runs:
                    if self.request.accepts and not self.request.accepts(_joined(base, run)):
                        continue
                    self.considered += 1
                    least = states + activations
                    if least > limit:
                        self.too_large += 1
                        self._keep_near(least - limit, base, run)
                        continue
                    count = run.accumulation
                    if count not in others:
                        counted = replace(base, accumulation=count)
                        others[count] = bound.traffic(counted), bound.offload(counted)
                    seconds = max(compute, *others[count])
                    cell.bound = min(cell.bound, seconds)
                    expected = bound.expected(run, compute, *others[count])
                    low, near = (least, least) if goal == "memory" else (seconds, expected)
                    if goal == "cost":
                        low, near = _price(seconds, run, one), _price(expected, run, one)
                    group.waiting.append((near, self.considered, low, base, run))
        for group in groups.values():
            group.waiting.sort(key=lambda entry: entry[:2])
        return [group for group in groups.values() if group.waiting]

    def _compute(self, layout: ParallelLayout, one: LayoutSpace) -> PlanCandidate | None:
        """Return the layout with its memory and time; None if it does not fit."""
        alike = replace(layout, micro_batch=1, accumulation=1)
        # A micro-batch that is larger holds no less, since a pipeline holds as many samples or more.
        if layout.micro_batch >= self._failed.get(alike, LARGEST_MICRO_BATCH + 1):
            return None
        # Runs that differ in the row alone hold the same activations, so one of them tells of all.
        states = one.bound.states(layout)
        alike_run = (self.request.machine is one.machine, *_run_of(layout))
        limit = least_memory(one.machine) * (1 - MEMORY_MARGIN)
        if states + self._extra.get(alike_run, 0.0) > limit:
            return None
        self.weighed += 1
        memory = tuple(self.memory(self.request.source, self.request.sequence, _steady(layout), one.machine))
        extra = max(rank.device for rank in memory) - states
        self._extra[alike_run] = min(extra, self._extra.get(alike_run, extra))
        over = lacking(memory, layout, one.machine)
        worst = max(over.values())
        cell = self.cells[replace(layout.row, offloaded=1.0), (layout.tensor, layout.context, layout.pipeline)]
        cell.weigh(worst)
        if worst > 0:
            if over["device"] > 0:  # the host may hold more with one micro-batch than with several
                self._failed[alike] = layout.micro_batch
            if self._weighed_near is None or worst < self._weighed_near[0]:
                self._weighed_near = worst, layout, memory
            return None
        self.computed += 1
        found = self._time(layout, one.machine)
        cell.time(found.seconds)
        candidate = PlanCandidate(layout, one.machine, self.request.sequence, memory, found)
        self.found.append(candidate)
        return candidate

    def _time(self, layout: ParallelLayout, machine: Machine) -> StepTime:
        """Return the time of a step; that of a long pipeline is continued from two shorter ones."""
        source, sequence, ranks = self.request.source, self.request.sequence, layout.pipeline
        if ranks == 1 or layout.accumulation <= 4 * ranks:
            return self.time(source, sequence, layout, machine)
        # A filled pipeline repeats itself, and schedules of few lengths are made instead of those of all.
        short, long = (
            self.time(source, sequence, replace(layout, accumulation=count), machine)
            for count in (2 * ranks, 3 * ranks)
        )
        times = (layout.accumulation - 3 * ranks) / ranks
        waits = {
            name: long.waits.get(name, 0.0) + times * (long.waits.get(name, 0.0) - short.waits.get(name, 0.0))
            for name in {**short.waits, **long.waits}
        }
        flops = long.flops + times * (long.flops - short.flops)
        return StepTime(long.seconds + times * (long.seconds - short.seconds), waits, (), flops)

    def _exactly(self, candidate: PlanCandidate) -> PlanCandidate:
        """Return a candidate with the time of all its micro-batches."""
        source, sequence = self.request.source, self.request.sequence
        return replace(candidate, time=self.time(source, sequence, candidate.layout, candidate.machine))

    def _keep_near(self, over: float, base: ParallelLayout, run: ParallelLayout) -> None:
        """Keep the layouts that lack least."""
        if over >= self._near_limit:
            return
        self.nearest.append((over, self.considered, base, run))
        if len(self.nearest) > 64 * SHOWN:
            self.nearest = sorted(self.nearest, key=lambda one: one[:2])[:SHOWN]
            self._near_limit = self.nearest[-1][0]

    def _near(self, machine: Machine) -> tuple[tuple[ParallelLayout, tuple[RankMemory, ...]], ...]:
        """Return the layouts that lack least, by their memory instead of its bound."""
        few = [_joined(*pair) for _, _, *pair in sorted(self.nearest, key=lambda one: one[:2])[:SHOWN]]
        request = self.request
        weighed = [(one, tuple(self.memory(request.source, request.sequence, _steady(one), machine))) for one in few]
        if self._weighed_near is not None:
            weighed.append(self._weighed_near[1:])
        return tuple(sorted(weighed, key=lambda pair: max(lacking(pair[1], pair[0], machine).values())))


@dataclass
class _Group:
    """Layouts of one mesh and row, by their bounds."""

    search: LayoutSpace
    # Expected score, number, bound of the score, and the layout in two parts: mesh and row, and all else.
    waiting: list[tuple[float, int, float, ParallelLayout, ParallelLayout]]
    next: int = 0
    ratio: float = 1.0  # of a computed score to what was expected

    def advance(self) -> None:
        """Go on to the next layout."""
        self.next += 1

    def learn(self, ratio: float) -> None:
        """Note how a computed score was to what was expected."""
        self.ratio = ratio

    def layout(self, place: int) -> ParallelLayout:
        """Return the layout at a place; it is put together now, since most are never asked for."""
        return _joined(*self.waiting[place][3:])


def _joined(base: ParallelLayout, run: ParallelLayout) -> ParallelLayout:
    """Return a layout with the groups, the row and the slots of ``base``, and all else of ``run``."""
    return replace(run, data=base.data, replicate=base.replicate, row=base.row, parameter_slots=base.parameter_slots)


def _run_of(layout: ParallelLayout) -> tuple[object, ...]:
    """Return all on which activations depend."""
    mesh = layout.tensor, layout.context, layout.pipeline, layout.sequence
    run = layout.micro_batch, layout.accumulation, layout.schedule, layout.chunks
    # Gathered units are not among the states of the bound.
    gathered = layout.row.parameter, layout.row.parameter_tier, layout.parameter_slots
    return *mesh, *run, layout.recompute, layout.activations_on_host, *gathered


def _steady(layout: ParallelLayout) -> ParallelLayout:
    """Return the layout with as many micro-batches as show the most memory that more of them take."""
    # A rank holds no more after its warm-up, which is over within three micro-batches a rank.
    if layout.pipeline > 1 and layout.schedule in ("gpipe", "breadth-first"):
        return layout
    most = 3 * layout.pipeline if layout.pipeline > 1 else 4
    return layout if layout.accumulation <= most else replace(layout, accumulation=most)


def _price(seconds: float, layout: ParallelLayout, one: LayoutSpace) -> float:
    """Return the price by a bound, as ``PlanCandidate.price`` has it."""
    unit = StepTime(seconds, {})
    return PlanCandidate(layout, one.machine, one.request.sequence, (), unit).price


def _no_batch(request: PlanRequest, one: LayoutSpace) -> list[LayoutSpace]:
    """Raise ValueError with the nearest batches that can be shared out."""
    total = one.machine.devices
    ways = min(total // (t * c * p) for t, c, p in one.shapes())
    below, above = request.batch // ways * ways, (request.batch // ways + 1) * ways
    nearest = f"{below} or {above}" if below else str(above)
    fewer = _fewer(request)
    raise ValueError(
        f"a batch of {request.batch} samples cannot be shared out evenly to {total} devices: the model divides over "
        f"{total // ways} of them at most, which leaves a multiple of {ways} data-parallel ranks; the nearest batches "
        f"that work: {nearest}" + (f"; or use {fewer} devices" if fewer else "")
    )


def _fewer(request: PlanRequest) -> int:
    """Return the most devices, in whole nodes, to which the batch can be shared out; 0 if there are none."""
    machine = request.machine
    if len(machine.nodes) > 1:
        return 0  # it would have to be said which kind of node is left out
    node, count = machine.nodes[0]
    parts = (replace(machine, nodes=((node, fewer),)) for fewer in range(count - 1, 0, -1))
    return next((part.devices for part in parts if LayoutSpace(request, part).meshes()), 0)
