"""Plan for what blocks leave for their backward: each operator's result is kept, computed again or moved to the host.

A recomputation runs every operator of a block whose result is not there, so the seconds of operators add up, and the
choice is a knapsack: seconds saved, bytes on the device, and bytes that the link moves beside the computation.

Sources: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022; Dantzig,
"Discrete-Variable Extremum Problems", 1957 (the bound of the relaxation).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from math import ceil, inf
from typing import NamedTuple

from zeromesh.apps.plan.choose.fit import lacking
from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
from zeromesh.apps.plan.cost.cost import CostSource, Divided, ModelCost, Recompute, UnitCost
from zeromesh.apps.plan.machine.calibration import reserved_margin
from zeromesh.apps.plan.machine.cluster import Machine
from zeromesh.apps.plan.predict.rank_memory import Moment, memory_of
from zeromesh.apps.plan.saved_costs import BlockCost, Candidate, Plans, SavedCosts, saved_costs
from zeromesh.base.saved_tensors import BlockPlan, Saved
from zeromesh.base.words import bytes_text
from zeromesh.config.settings import Settings

MOST_BRANCHES = 5_000
"""Branches after which a search ends with the best choice so far; the bound says how far it may be from the best."""

ROUNDS = 3  # in which a plan takes what is left of a device


class Knapsack(NamedTuple):
    """Choice for one block."""

    choices: Mapping[tuple[str, int], Saved]
    saved: float  # seconds that are not computed again
    bound: float  # seconds that no choice exceeds


def choose(costs: Sequence[SavedCosts], budgets: Sequence[float]) -> tuple[RankPlan, ...]:
    """Return the fastest plans of each pipeline rank whose activations need at most its budget, in bytes.

    Raises:
        ValueError: no plan needs so little; the text has the smallest budget that works.
    """
    ranks, lacking_ranks = [], []
    for rank, budget in zip(costs, budgets, strict=True):
        best, least, fastest = None, inf, inf
        for plans in _plans(rank, budget):
            if rank.moved(plans) > rank.host:
                continue
            peak, seconds = rank.peak(plans), rank.seconds(plans)
            least = min(least, peak)
            if peak <= budget and seconds < fastest:
                best, fastest = plans, seconds
        if best is None:
            lacking_ranks.append((least, budget))
        else:
            ranks.append(RankPlan(rank, best))
    if lacking_ranks:
        least, budget = max(lacking_ranks)
        room = f"activations may take {budget / 1e9:.6g} GB of a device"
        if budget < 0:
            room = f"states without activations need {bytes_text(-budget)} more than a device has"
        raise ValueError(
            f"{room}, and no plan needs less than {bytes_text(least)}: "
            f"set activation_checkpointing.budget_gb to {ceil(least / 1e3) / 1e6:.15g} or more, if the device has it, "
            "or choose a smaller micro-batch"
        )
    return tuple(ranks)


def _plans(costs: SavedCosts, budget: float) -> Iterator[Plans]:
    """Yield plans of which one is the fastest: the last blocks keep all, the others share one choice by their kind."""
    total = len(costs.blocks)
    for keeping in range(total, -1, -1):  # the first of equals is taken: without checkpoints
        # The last blocks keep all: their bytes are free again when earlier blocks are computed again.
        checkpointed = total - keeping
        tails = (BlockPlan(keeps_all=True),) * keeping
        for inputs in (Saved.KEEP, Saved.MOVE) if costs.link else (Saved.KEEP,):
            bare = (BlockPlan(inputs),) * checkpointed + tails
            yield bare
            spare = budget - costs.peak(bare)
            if spare <= 0 or not checkpointed:
                continue
            copies = sum(costs.in_flight[:checkpointed])
            plan_of_kind: dict[tuple[float, float, tuple[Candidate, ...]], BlockPlan] = {}
            # Blocks whose own backward is the peak have their kept results in it anyway: all that the later moments
            # leave is shared evenly; and less of it where that proves too much.
            left = max(0.0, budget - costs.kept(bare))
            most = min(spare, costs.link * max(block.passing for block in costs.blocks))
            for flying in {0.0, most / 2, most}:  # bytes of moves on their way
                for room in {spare - flying, max(0.0, left - flying)}:
                    chosen = []
                    for block in costs.blocks[:checkpointed]:
                        moved = block.inputs if inputs is Saved.MOVE else 0.0
                        # Beside the next block's forward on the way out, and beside its backward on the way back.
                        beside = min(flying, max(0.0, costs.link * block.passing - moved))
                        key = (room, beside, block.candidates)
                        if key not in plan_of_kind:
                            packed = pack(block.candidates, room / copies, beside)
                            plan_of_kind[key] = BlockPlan(inputs, packed.choices)
                        chosen.append(plan_of_kind[key])
                    yield (*chosen, *tails)


def pack(candidates: Sequence[Candidate], room: float, beside: float, branches: int = MOST_BRANCHES) -> Knapsack:
    """Choose what one block keeps and moves so that it computes the fewest seconds again.

    Args:
        candidates: its operators.
        room: bytes that it may keep on the device.
        beside: bytes that the link moves while the block computes.
        branches: of the search; where they suffice, the choice is the best one.
    """
    items = sorted(candidates, key=lambda x: (-x.seconds / x.size, x.key))
    best: tuple[float, tuple[tuple[tuple[str, int], Saved], ...]] = (0.0, ())
    bound = _relaxed(items, room + beside)
    # Depth first, the most seconds per byte first, so that the first leaf is the greedy choice.
    stack: list[tuple[int, float, float, float, tuple[tuple[tuple[str, int], Saved], ...]]] = []
    stack.append((0, room, beside, 0.0, ()))
    while stack and branches > 0:
        branches -= 1
        place, left, link, saved, chosen = stack.pop()
        if saved > best[0]:
            best = saved, chosen
        # A relative margin: equal choices in another order are not looked at.
        if place == len(items) or saved + _relaxed(items[place:], left + link) <= best[0] * (1 + 1e-9):
            continue
        item = items[place]
        stack.append((place + 1, left, link, saved, chosen))
        if item.size <= left:
            with_kept = (*chosen, (item.key, Saved.KEEP))
            stack.append((place + 1, left - item.size, link, saved + item.seconds, with_kept))
        if item.size <= link:
            moved = (*chosen, (item.key, Saved.MOVE))
            stack.append((place + 1, left, link - item.size, saved + item.seconds, moved))
    return Knapsack(dict(best[1]), best[0], bound if stack else best[0])


def _relaxed(items: Sequence[Candidate], room: float) -> float:
    """Return the seconds of items, in their order, that fit ``room`` bytes, and of a part of the next one."""
    total = 0.0
    for item in items:
        if item.size > room:
            return total + item.seconds * room / item.size
        room -= item.size
        total += item.seconds
    return total


class RankPlan(NamedTuple):
    """Plans of the blocks of one pipeline rank."""

    costs: SavedCosts
    plans: Plans

    @property
    def peak(self) -> float:
        """The most bytes of activations at one time."""
        return self.costs.peak(self.plans)

    def lines(self) -> list[str]:
        """Return lines that list the choices: operator, bytes, seconds, choice, and why."""
        costs, plans = self
        moved = f", {bytes_text(costs.moved(plans))} on the host" if costs.moved(plans) else ""
        lines = [
            f"activations at the peak: {bytes_text(self.peak)}{moved}; computed again: "
            f"{costs.seconds(plans) * 1e3:.3g} ms of each micro-batch"
        ]
        pairs = [*zip(costs.blocks, plans, strict=True)]
        for _, alike in groupby(pairs, key=lambda pair: (pair[1], pair[0].candidates)):
            (block, plan), *others = alike
            name = f"{block.name} to {others[-1][0].name}" if others else block.name
            if plan.keeps_all:
                lines.append(f"{name}: keeps all {bytes_text(block.everything)}, free when earlier blocks need bytes")
                continue
            lines.append(f"{name}: inputs of {bytes_text(block.inputs)}: {plan.inputs.value}")
            for item in sorted(block.candidates, key=lambda x: -x.seconds / x.size):
                fate = plan.results.get(item.key, Saved.RECOMPUTE)
                operator = f"{item.key[0].partition('::')[2]} {item.key[1]}"
                size, seconds = f"{bytes_text(item.size):>9}", f"{item.seconds * 1e6:9.1f} us"
                value = f"{1e9 * item.seconds / item.size:9.3g} s/GB"
                lines.append(f"  {operator:<40} {size} {seconds} {value}  {fate.value}: {WHY[fate]}")
        return lines


WHY = {
    Saved.KEEP: "many seconds for its bytes",
    Saved.MOVE: "the link has time for it",
    Saved.RECOMPUTE: "few seconds for its bytes",
}


@dataclass(frozen=True)
class PlannedCost:
    """Cost of a model whose blocks follow a plan of saved tensors: ``Recompute.PLANNED`` stands for it."""

    source: CostSource
    ranks: tuple[RankPlan, ...]  # of the pipeline

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.source.name

    @property
    def blocks(self) -> list[tuple[BlockCost, BlockPlan]]:
        """All blocks, and their plans."""
        return [pair for rank in self.ranks for pair in zip(rank.costs.blocks, rank.plans, strict=True)]

    def at(self, micro_batch: int, sequence: int, context: int = 1) -> ModelCost:
        """Return the cost of a micro-batch, of the size that the plan is for."""
        cost = self.source.at(micro_batch, sequence, context)
        chosen = {block.name: (block, plan) for block, plan in self.blocks}
        units = (_planned(unit, *chosen[unit.name]) if unit.name in chosen else unit for unit in cost.units)
        return replace(cost, units=tuple(units))

    def lines(self) -> list[str]:
        """Return lines that list the choices of all pipeline ranks."""
        numbered = [f"pipeline rank {rank}:" for rank in range(len(self.ranks))] if len(self.ranks) > 1 else [""]
        return [line for head, rank in zip(numbered, self.ranks, strict=True) for line in (head, *rank.lines()) if line]


def _planned(unit: UnitCost, block: BlockCost, choice: BlockPlan) -> UnitCost:
    # Its recomputation stops behind the last result that the backward needs.
    calls = () if choice.keeps_all else unit.calls[: len(block.results)]
    repeated = tuple(kernel for call in calls if call.key not in choice.results for kernel in call.kernels)
    extra = Divided(whole=block.beyond(choice))
    peaks = {name: getattr(unit, name).plus(extra) for name in ("backward_peak", "early_peak", "gradient_peak")}
    # The bytes are those of one rank already, so none of them are divided again.
    saved = {**unit.saved, Recompute.PLANNED: Divided(whole=block.held(choice))}
    return replace(unit, saved=saved, repeated=repeated, **peaks)


def planned_cost(
    settings: Settings,
    source: CostSource,
    sequence: int,
    layout: ParallelLayout,
    machine: Machine,
    firsts: Sequence[str] | None = None,
) -> PlannedCost:
    """Return the cost of a run with the plan that its settings ask for; raise ValueError as ``choose``.

    ``firsts`` are the names of the first block of each pipeline stage; None: as the planner cuts the model.
    """
    cost = source.at(layout.micro_batch * settings.rows_per_sample, sequence, layout.context)
    places = None if firsts is None else places_of(cost, firsts)
    costs = saved_costs(cost, machine, layout, places)
    if settings.compile.enabled:
        costs = [replace(rank, link=0.0) for rank in costs]  # moves cannot be traced
    if (gigabytes := settings.activation_checkpointing.budget_gb) is not None:
        return PlannedCost(source, choose(costs, [gigabytes * 1e9] * len(costs)))

    def left(of: CostSource, only: bool) -> list[float]:
        """Return the bytes of a device that each pipeline rank of a run leaves, or its states alone."""
        ranks = memory_of(of, sequence, layout, machine, places=places)
        if only:
            ranks = [replace(rank, timeline=tuple(map(_without_activations, rank.timeline))) for rank in ranks]
        node = machine.nodes[0][0]
        sharing = min(node.devices, layout.ranks) if node.device.processor else 1  # ranks of a processor's memory
        # An allocator reserves more than it is asked for.
        share = 1 / (1 + reserved_margin())
        return [-lacking([rank], layout, machine, share)["device"] / sharing for rank in ranks]

    budgets = left(source, only=True)
    planned = PlannedCost(source, choose(costs, budgets))
    # States and activations are not at their most at the same moment: what is left is given to the plan.
    for _ in range(ROUNDS):
        budgets = [budget + more for budget, more in zip(budgets, left(planned, only=False), strict=True)]
        larger = PlannedCost(source, choose(costs, budgets))
        if min(left(larger, only=False)) < 0:
            break
        planned = larger
    return planned


def places_of(cost: ModelCost, firsts: Sequence[str]) -> list[range]:
    """Return the places of each stage's units; raise ValueError for a stage that begins inside of a block."""
    names = [unit.name for unit in cost.units]
    if missing := [name for name in firsts[1:] if name not in names]:
        raise ValueError(
            f'activation_checkpointing.granularity is "auto", and a stage begins at {missing[0]}, which is none of the '
            "blocks that the planner finds; leave pipeline.blocks out, or set granularity to "
            '"full" or "selective"'
        )
    starts = [0, *map(names.index, firsts[1:]), len(names)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def _without_activations(moment: Moment) -> Moment:
    states = {name: size for name, size in moment.bytes.items() if name not in ("activation", "temporary")}
    return Moment(moment.label, states)
