"""Search for the best layout of a model on a machine: enumerate, leave out by bounds, compute the rest, rank.

Meshes wait in the order of their least seconds of computation. One whose turn comes is replaced by groups of layouts
that share it and a placement row, each group in the order of expected times. Groups are served by the expected time of
their next layout times the ratio of computed to expected time that the group has shown. The search ends when no
layout's bound is below the best time: then no other layout can be better. It also ends after a number of layouts, which
is said.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import NamedTuple

from zeromesh.apps.plan.choose.fit import MEMORY_MARGIN, is_tight, lacking
from zeromesh.apps.plan.choose.layout_documents import is_accepted
from zeromesh.apps.plan.choose.mesh_layouts import LayoutGroup, MeshLayouts, joined, price_of
from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
from zeromesh.apps.plan.choose.space import (
    LARGEST_MICRO_BATCH,
    LayoutSpace,
    MeshSizes,
    PlanRequest,
    refuse_batch,
)
from zeromesh.apps.plan.cost.cost import Recompute
from zeromesh.apps.plan.machine.calibration import reserved_margin
from zeromesh.apps.plan.machine.cluster import Machine
from zeromesh.apps.plan.predict.lower_bounds import best_rate, least_memory, slowest
from zeromesh.apps.plan.predict.rank_memory import RankMemory
from zeromesh.apps.plan.predict.time import StepTime
from zeromesh.base.placement import PlacementRow, Tier

SHOWN = 8
ALIKE = 0.02  # layouts whose scores differ by less are alike, and the simplest of them is the best
FURTHER = 48  # groups of layouts that are tried for a table that is not full


class SearchEffort(NamedTuple):
    """Numbers of layouts after which a search ends, whether or not its result is proven."""

    computed: int = 200  # layouts whose time is computed
    tried: int = 140  # of them, before others are left out whose bounds promise too little
    weighed: int = 1200  # layouts whose memory is computed
    shown: int = SHOWN  # rows of the table


FOR_TIGHT = SearchEffort(40, 24, 240)
"""Effort for layouts that are faster than the best that is safe."""


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
    def mfu_interval(self) -> tuple[float, float]:
        """Values of ``mfu`` between which eight of ten such runs are expected."""
        calibration = self.time.calibration
        return self.mfu / calibration.high, self.mfu / calibration.low

    @cached_property
    def tight(self) -> bool:
        """True if it may run out of memory, as an allocator reserves more than it hands out."""
        return bool(self.memory) and is_tight(self.memory, self.machine)

    @property
    def price(self) -> float:
        """Price per million tokens; in device-hours where a node has no price."""
        return price_of(self.machine, self.time.seconds, self.layout.samples * self.sequence)

    @property
    def kind(self) -> tuple[object, ...]:
        """Mesh, placement and recomputation: layouts that differ in other things alone are one for a user."""
        layout, row = self.layout, self.layout.row
        axes = layout.replicate, layout.tensor, layout.context, layout.pipeline, layout.expert
        mesh = *axes, self.machine.devices
        tiers = row.parameter_tier, row.optimizer_tier, row.offloaded, row.split
        return *mesh, layout.stage, *tiers, layout.recompute, layout.activations_on_host

    def like(self, other: PlanCandidate) -> bool:
        """Return whether the layouts are alike in all that matters: time, memory and devices."""
        pairs = (self.time.seconds, other.time.seconds), (self.fullest.device, other.fullest.device)
        near = all(abs(first - second) <= ALIKE * min(first, second) for first, second in pairs)
        return near and self.machine.devices == other.machine.devices and self.tight is other.tight

    @property
    def parts(self) -> int:
        """Number of things that a layout does beside computing the model whole on each device."""
        layout, row = self.layout, self.layout.row
        # Each doubling of an axis that shares the model counts.
        axes = (layout.replicate > 1) + sum(
            (s - 1).bit_length() for s in (layout.tensor, layout.context, layout.pipeline, layout.expert)
        )
        tiers = sum(tier is not Tier.DEVICE for tier in (row.parameter_tier, row.optimizer_tier)) + row.split
        runs = (layout.recompute is not Recompute.NONE) + layout.activations_on_host + (layout.schedule != "1f1b")
        return axes + tiers + runs + layout.stage + 2 * self.tight

    def score(self, goal: str) -> float:
        """Return the smaller-is-better number of a goal."""
        return {"time": self.time.seconds, "memory": self.fullest.device, "cost": self.price}[goal]


@dataclass
class LayoutCell:
    """All layouts of one placement and one mesh, for a map."""

    bound: float = inf  # seconds, no more than those of any layout whose states fit
    seconds: float = inf  # of the best computed layout
    over: float = inf  # bytes that the smallest layout lacks; 0 where one fits
    over_bound: float = inf  # the same by the bound of memory, where nothing was computed

    def note(self, over: float = inf, seconds: float = inf) -> None:
        """Take in what was computed of one layout."""
        self.over, self.seconds = min(self.over, over), min(self.seconds, seconds)


@dataclass(frozen=True)
class PlanResult:
    """Layouts that were found, and what was left out."""

    request: PlanRequest
    shown: tuple[PlanCandidate, ...]  # the best first; each is of another kind, and differs from the others in numbers
    considered: int  # layouts enumerated
    too_large: int  # left out since their states alone do not fit
    weighed: int  # whose memory was computed
    computed: int  # whose time was computed
    proven: bool  # true if no layout that was left out can be better, by its bound
    nearest: tuple[tuple[ParallelLayout, tuple[RankMemory, ...]], ...] = ()  # those that lack least, if none fits
    cells: dict[tuple[PlacementRow, MeshSizes], LayoutCell] = field(default_factory=dict)

    @property
    def best(self) -> PlanCandidate | None:
        """The best layout, a tight one only if no other fits; None if nothing fits."""
        return self.shown[0] if self.shown else None


def machines_for(request: PlanRequest) -> list[Machine]:
    """Return the machines to try: the whole, and for the price also smaller parts of it."""
    machine = request.machine
    machines = [machine]
    if request.goal == "cost" and len(machine.nodes) == 1:
        (node, count) = machine.nodes[0]
        while count > 1:
            count = count // 2
            machines.append(replace(machine, nodes=((node, count),)))
    return machines


Progress = Callable[[int, int], None]
"""Told the number of layouts that were computed, and after how many the search ends at the latest."""


def search(request: PlanRequest, effort: SearchEffort | None = None, progress: Progress | None = None) -> PlanResult:
    """Return the best layouts for a request; the result does not depend on the speed of this machine.

    Raises:
        ValueError: the batch cannot be shared out to so many devices, with the nearest that can.
    """
    effort = effort or SearchEffort()
    safe = _Ranking(request, effort, progress, 1 / (1 + reserved_margin()))
    result = safe.run()
    if result.best is not None and effort.shown == 1:
        return result
    # Of tight layouts, those are listed that are better than the best safe one, or all if there is none.
    tight = _Ranking(request, effort if result.best is None else FOR_TIGHT, progress, 1 - MEMORY_MARGIN, safe)
    everything = tight.run()
    return replace(
        everything,
        weighed=safe.weighed + tight.weighed,
        computed=safe.computed + tight.computed,
        proven=(result if result.best is not None else everything).proven,
    )


class _Ranking:
    """The search's state: meshes and groups that wait, and what was found."""

    def __init__(
        self,
        request: PlanRequest,
        effort: SearchEffort,
        progress: Progress | None,
        share: float,
        before: _Ranking | None = None,
    ) -> None:
        self.request, self.effort, self.progress = request, effort, progress
        self.share = share  # of a device's memory that a layout may take
        self.cells: dict[tuple[PlacementRow, MeshSizes], LayoutCell] = before.cells if before else {}
        self.found: list[PlanCandidate] = [*before.found] if before else []
        self._nearest: tuple[float, ParallelLayout, tuple[RankMemory, ...]] | None = None  # of those that do not fit
        self.weighed = self.computed = 0
        self._failed: dict[ParallelLayout, int] = {}  # least micro-batch that did not fit, by the rest of the layout
        self._extra: dict[tuple[object, ...], float] = {}  # least bytes beside states, by what is not states

    def run(self) -> PlanResult:
        """Search, and return what was found."""
        spaces = [LayoutSpace(self.request, machine) for machine in machines_for(self.request)]
        spaces = [space for space in spaces if space.meshes()] or refuse_batch(self.request, spaces[0])
        meshes = [MeshLayouts(space, self.share, mesh) for space in spaces for mesh in space.meshes()]
        for mesh in meshes:
            self._map(mesh)
        # Groups have the number of their mesh, and their own in it; a mesh comes before them.
        waiting: list[_Entry] = [(mesh.least, n, -1, mesh) for n, mesh in enumerate(meshes) if mesh.least < inf]
        heapq.heapify(waiting)
        left: list[_Entry] = []
        best = min((candidate.score(self.request.goal) for candidate in self.found), default=inf)
        least, proven = 0.0, True
        while waiting:
            entry = heapq.heappop(waiting)
            _, number, place, part = entry
            expected, bound = (part.least, part.least) if isinstance(part, MeshLayouts) else part.waiting[part.next][:2]
            over = self.computed >= self.effort.computed or self.weighed >= self.effort.weighed
            # No layout of many did better than expected by more than the least ratio, so this one is not going to.
            if over or (self.computed >= self.effort.tried and expected * least >= best):
                proven = False
                left.append(entry)
                if over:
                    break
                continue
            if isinstance(part, MeshLayouts):
                if bound < best:
                    self._open(part, number, waiting)
                else:
                    left.append(entry)
                continue
            if bound < best:
                candidate = self._compute(part.take(), part.space)
                if candidate is not None:
                    score = candidate.score(self.request.goal)
                    ratio = part.compare(score, expected)
                    least = min(least or ratio, ratio)
                    best = min(best, score)
                    if self.progress is not None:
                        self.progress(self.computed, self.effort.computed)
            if part.has_better(best):
                heapq.heappush(waiting, (part.waiting[part.next][0] * part.ratio, number, place, part))
        if self.found:
            self._fill(left + waiting)
        asked = not self.found and self.effort.shown > 1
        nearest = self._near([mesh for mesh in meshes if mesh.space is spaces[0]]) if asked else ()
        return PlanResult(
            self.request, tuple(self._listed()), sum(len(mesh.bases) * len(mesh.runs) for mesh in meshes),
            sum(mesh.too_large for mesh in meshes), self.weighed, self.computed, proven, nearest, self.cells,
        )  # fmt: skip

    def _listed(self) -> list[PlanCandidate]:
        """Return the best that is not tight, and then what differs from it and from each other in what matters."""
        goal, kinds = self.request.goal, set()
        listed: list[PlanCandidate] = []

        def order(candidate: PlanCandidate) -> tuple[float, ...]:
            return candidate.score(goal), candidate.time.seconds, candidate.machine.devices

        candidates = sorted(self.found, key=order)
        safe_scores = {other.kind: other.score(goal) for other in reversed(candidates) if not other.tight}
        # The best that is not tight is listed, whatever the number of faster tight ones.
        for candidate in (*[safe for safe in candidates if not safe.tight][:1], *candidates):
            # Of one kind, a smaller micro-batch may be safe where the best is tight, and nearly as fast.
            kind = *candidate.kind, candidate.tight
            least = candidate.score(goal) * (1 + ALIKE) if candidate.tight else 0.0
            if kind in kinds or least >= safe_scores.get(candidate.kind, inf):
                continue
            kinds.add(kind)
            twin = next((place for place, other in enumerate(listed) if candidate.like(other)), None)
            if twin is not None:
                listed[twin] = min(listed[twin], candidate, key=lambda like: like.parts)
            elif len(listed) < max(1, self.effort.shown):
                listed.append(candidate)
        # The prediction cannot tell layouts that are so near to each other, and users can tell a simple one.
        listed.sort(key=order)
        safe = [candidate for candidate in listed if not candidate.tight] or listed
        alike = [candidate for candidate in safe if candidate.score(goal) <= safe[0].score(goal) * (1 + ALIKE)]
        simplest = min(alike, key=lambda candidate: candidate.parts, default=None)
        return sorted(listed, key=lambda candidate: candidate is not simplest)

    def _fill(self, left: list[_Entry]) -> None:
        """Compute layouts of further groups for the table, by their bounds."""
        heapq.heapify(left)
        tried, most = 0, self.weighed + self.effort.weighed / 5
        while left and tried < FURTHER and self.weighed < most and len(self._listed()) < self.effort.shown:
            _, number, _, part = heapq.heappop(left)
            if isinstance(part, MeshLayouts):
                self._open(part, number, left)
            elif not part.next:
                tried += 1
                places = range(min(6, len(part.waiting)))
                any(self._compute(part.layout(place), part.space) is not None for place in places)

    def _map(self, mesh: MeshLayouts) -> None:
        """Note the bounds of a mesh's placements."""
        limit = mesh.limit
        for states, base in mesh.bases:
            cell = self.cells.setdefault((replace(base.row, offloaded=1.0), mesh.sizes), LayoutCell())
            cell.over_bound = min(cell.over_bound, max(0.0, states - limit))
            if states + mesh.sizes_kept[0] <= limit:
                cell.bound = min(cell.bound, mesh.seconds)

    def _open(self, mesh: MeshLayouts, number: int, waiting: list[_Entry]) -> None:
        """Put a mesh's groups among what waits."""
        space, goal, accepts = mesh.space, self.request.goal, self.request.accepts
        limit, bound = mesh.limit, space.bound
        groups: dict[tuple[object, ...], LayoutGroup] = {}
        for states, base in mesh.bases:
            group = groups.setdefault((base.data, base.row), LayoutGroup(space, []))
            others: dict[int, tuple[float, float]] = {}  # of links and the host, by the number of micro-batches
            for compute, activations, run in mesh.runs:
                least = states + activations
                if least > limit or (accepts and not accepts(joined(base, run))):
                    continue
                if goal == "memory":
                    group.waiting.append((least, least, base, run))
                    continue
                count = run.accumulation
                if count not in others:
                    counted = replace(base, accumulation=count)
                    others[count] = bound.traffic(counted), bound.offload(counted)
                expected, low = bound.expected(run, compute, *others[count]), max(compute, *others[count])
                group.waiting.append((expected * mesh.price, low * mesh.price, base, run))
        for place, group in enumerate(groups.values()):
            group.waiting.sort(key=lambda entry: entry[0])
            if group.waiting:
                heapq.heappush(waiting, (group.waiting[0][0], number, place, group))

    def _compute(self, layout: ParallelLayout, space: LayoutSpace) -> PlanCandidate | None:
        """Return the layout with its memory and time; None if it does not fit."""
        alike = replace(layout, micro_batch=1, accumulation=1)
        # A micro-batch that is larger holds no less, since a pipeline holds as many samples or more.
        if layout.micro_batch >= self._failed.get(alike, LARGEST_MICRO_BATCH + 1):
            return None
        # Runs that differ in the row alone hold the same activations, so one of them tells of all.
        states = space.bound.states(layout)
        alike_run = (self.request.machine is space.machine, *_run_of(layout))
        if states + self._extra.get(alike_run, 0.0) > self.share * least_memory(space.machine):
            return None
        self.weighed += 1
        memory = self.request.memory_on(space.machine, _steady(layout))
        extra = max(rank.device for rank in memory) - states
        self._extra[alike_run] = min(extra, self._extra.get(alike_run, extra))
        over = lacking(memory, layout, space.machine, self.share)
        worst = max(over.values())
        mesh = layout.tensor, layout.context, layout.pipeline, layout.expert
        cell = self.cells[replace(layout.row, offloaded=1.0), mesh]
        cell.note(over=max(0.0, worst))
        if worst > 0:
            if over["device"] > 0:  # the host may hold more with one micro-batch than with several
                self._failed[alike] = layout.micro_batch
            closer = self._nearest is None or worst < self._nearest[0]
            if closer and is_accepted(layout, slowest(space.machine)):
                self._nearest = worst, layout, memory
            return None
        if not is_accepted(layout, slowest(space.machine)):
            return None
        self.computed += 1
        step_time = self.request.time_on(space.machine, layout)
        cell.note(seconds=step_time.seconds)
        self.found.append(PlanCandidate(layout, space.machine, self.request.sequence, memory, step_time))
        return self.found[-1]

    def _near(self, meshes: list[MeshLayouts]) -> tuple[tuple[ParallelLayout, tuple[RankMemory, ...]], ...]:
        """Return the layouts that lack least, by their memory instead of its bound."""
        request, machine = self.request, meshes[0].space.machine
        least: dict[int, tuple[float, ParallelLayout]] = {}  # by the number of stages
        for mesh in meshes:
            for over, layout in mesh.lacking(request):
                if over < least.get(layout.pipeline, (inf,))[0]:
                    least[layout.pipeline] = over, layout
        # Bounds promise too much of many stages, whose memory takes long to compute, too.
        few = [least[stages][1] for stages in sorted(least)[:SHOWN]]
        weighed = [(layout, request.memory_on(machine, _steady(layout))) for layout in few]
        if self._nearest is not None:
            weighed.append(self._nearest[1:])
        return tuple(sorted(weighed, key=lambda pair: max(lacking(pair[1], pair[0], machine).values())))


_Entry = tuple[float, int, int, MeshLayouts | LayoutGroup]  # expected score, numbers of mesh and group, and one of them


def _run_of(layout: ParallelLayout) -> tuple[object, ...]:
    """Return all on which activations depend."""
    mesh = layout.tensor, layout.context, layout.pipeline, layout.expert, layout.sequence
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
