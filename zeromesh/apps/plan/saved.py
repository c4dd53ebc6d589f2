"""Plan for what blocks leave for their backward: each operator's result is kept, computed again or moved to the host.

A recomputation runs every operator of a block whose result is not there, so the seconds of operators add up, and the
choice is a knapsack: seconds saved, bytes on the device, and bytes that the link moves beside the computation.

Sources: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022; Dantzig,
"Discrete-Variable Extremum Problems", 1957 (the bound of the relaxation).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import ceil, inf
from typing import NamedTuple

from zeromesh.apps.plan.choose.fit import lacking
from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
from zeromesh.apps.plan.cost.cost import CostSource, Divided, ModelCost, Recompute, UnitCost
from zeromesh.apps.plan.machine.calibration import reserved_margin
from zeromesh.apps.plan.machine.cluster import Machine
from zeromesh.apps.plan.machine.collective_times import wire
from zeromesh.apps.plan.machine.rates import Habits, KernelSpeed
from zeromesh.apps.plan.predict.durations import CONTEXT_SECONDS
from zeromesh.apps.plan.predict.rank_memory import Moment, memory_of
from zeromesh.base.saved_tensors import BlockPlan, Saved, SavedPlan
from zeromesh.base.words import bytes_text
from zeromesh.config.settings import Settings

MOST_BRANCHES = 5_000
"""Branches after which a search ends with the best choice so far; the bound says how far it may be from the best."""

ROUNDS = 3  # in which a plan takes what is left of a device

BUDGET = "activation_checkpointing.budget_gb"


class Candidate(NamedTuple):
    """An operator whose result may be kept or moved."""

    key: tuple[str, int]
    size: float  # bytes
    seconds: float  # to compute it again


class Knapsack(NamedTuple):
    """Choice for one block."""

    choices: Mapping[tuple[str, int], Saved]
    saved: float  # seconds that are not computed again
    bound: float  # seconds that no choice exceeds


@dataclass(frozen=True)
class BlockCost:
    """Bytes and seconds of one block."""

    name: str
    inputs: float  # bytes that the block keeps to be computed again
    everything: float  # bytes that it keeps without a checkpoint
    recomputed: float  # bytes of both, when it has been computed again
    forward: float  # seconds
    backward: float  # seconds, without a recomputation
    recomputation: float  # seconds, with nothing kept
    transient: float  # bytes beyond, at most, in its passes
    candidates: tuple[Candidate, ...]
    results: tuple[tuple[tuple[str, int], float, float], ...]  # by operator: bytes that autograd keeps, and others

    def held(self, plan: BlockPlan) -> float:
        """Return the bytes that stay on the device between its forward and its backward."""
        if plan.keeps_all:
            return self.everything
        kept_bytes = sum(x.size for x in self.candidates if plan.results.get(x.key) is Saved.KEEP)
        return kept_bytes + (0.0 if plan.inputs is Saved.MOVE else self.inputs)

    def moved(self, plan: BlockPlan) -> float:
        """Return the bytes that go to the host, and come back before its backward."""
        if plan.keeps_all:
            return 0.0
        moved_bytes = sum(x.size for x in self.candidates if plan.results.get(x.key) is Saved.MOVE)
        return moved_bytes + (self.inputs if plan.inputs is Saved.MOVE else 0.0)

    def beyond(self, plan: BlockPlan) -> float:
        """Return the bytes of its recomputation beyond all that autograd keeps."""
        # Results that autograd does not keep are let go of when the recomputation has taken them.
        most = ahead = 0.0
        for key, saved, unsaved in () if plan.keeps_all else reversed(self.results):
            ahead += unsaved if key in plan.results else -saved
            most = max(most, ahead)
        return most

    def at_work(self, plan: BlockPlan) -> float:
        """Return the most bytes in its backward, when all that it needs is there again."""
        return (self.everything if plan.keeps_all else self.recomputed) + self.transient + self.beyond(plan)

    def again(self, plan: BlockPlan) -> float:
        """Return the seconds of its recomputation."""
        seconds_kept = sum(x.seconds for x in self.candidates if x.key in plan.results)
        return 0.0 if plan.keeps_all else max(0.0, self.recomputation - seconds_kept)


@dataclass(frozen=True)
class SavedCosts:
    """Blocks of a model, and what lies around them, in bytes; ``link`` is bytes per second to the host, 0 without."""

    blocks: tuple[BlockCost, ...]
    before: float
    after: float  # with what its passes need at their peak
    link: float = 0.0
    host: float = inf  # bytes that may wait on the host

    def peak(self, plan: SavedPlan) -> float:
        """Return the most bytes of activations and gradients of activations at one time."""
        held_bytes, highest, flying = self.before, 0.0, 0.0
        for block, choice in zip(self.blocks, plan.blocks, strict=True):
            # Beside a block, what the one before moves is still leaving in the forward, and comes back in the backward.
            beside = 0.0 if choice.keeps_all else flying  # the recomputation asks for it
            highest = max(highest, held_bytes + block.at_work(choice) + beside)
            held_bytes, flying = held_bytes + block.held(choice), block.moved(choice)
        return max(highest, held_bytes + self.after + flying)

    def moved(self, plan: SavedPlan) -> float:
        """Return the bytes that wait on the host."""
        return sum(block.moved(choice) for block, choice in zip(self.blocks, plan.blocks, strict=True))

    def seconds(self, plan: SavedPlan) -> float:
        """Return the seconds that the plan computes again."""
        return sum(block.again(choice) for block, choice in zip(self.blocks, plan.blocks, strict=True))


def saved_costs(cost: ModelCost, machine: Machine, layout: ParallelLayout | None = None) -> SavedCosts:
    """Return what the blocks of a model cost on one rank of a layout, by default of one rank.

    Raises:
        ValueError: the model could not be traced, or has no stack of like blocks.
    """
    layout, units = layout or ParallelLayout(), cost.units
    places = [place for place, unit in enumerate(units) if unit.calls]
    if not places:
        reason = cost.note or "it has no stack of like blocks, or only its sizes are known"
        raise ValueError(
            f"what {cost.name} saves for its backward cannot be planned: {reason}; set "
            'activation_checkpointing.granularity to "full" or "selective"'
        )
    node = machine.nodes[0][0]
    speed = KernelSpeed(node.device, layout, Habits())
    first, last = places[0], places[-1]

    def on(amount: Divided) -> float:
        return amount.on(layout.tensor, layout.sequence)

    around = [on(unit.saved[Recompute.NONE]) for unit in units]
    beyond = max(
        (on(peak) for unit in units[last + 1 :] for peak in (unit.forward_peak, unit.backward_peak)), default=0
    )
    between = sum(around[place] for place in range(first, last) if not units[place].calls)
    blocks = tuple(_block(speed, units[place]) for place in places)
    link = 0.0 if node.device.processor else wire(node.host, 1).bandwidth
    before, after = sum(around[:first]) + between, sum(around[last + 1 :]) + beyond
    return SavedCosts(blocks, before, after, link, node.host_memory / node.devices)


def _block(speed: KernelSpeed, unit: UnitCost) -> BlockCost:
    tensor, sequence = speed.layout.tensor, speed.layout.sequence
    amounts = [(call.size.on(tensor, sequence), call.unsaved.on(tensor, sequence)) for call in unit.calls]
    # A recomputation stops behind the last result that its backward needs.
    end = max((place for place, (size, unsaved) in enumerate(amounts, 1) if size > unsaved), default=0)
    calls = [(call, *sizes, speed.total(call.kernels)) for call, sizes in zip(unit.calls, amounts, strict=True)][:end]
    candidates = tuple(
        Candidate(call.key, size, seconds) for call, size, _, seconds in calls if call.keepable and size and seconds > 0
    )
    results = tuple((call.key, size - unsaved, unsaved) for call, size, unsaved, _ in calls)
    policies = Recompute.BLOCKS, Recompute.NONE, Recompute.PLANNED
    inputs, everything, both = (unit.saved[policy].on(tensor, sequence) for policy in policies)
    forward, backward = speed.total(unit.forward), speed.total(unit.input, True) + speed.total(unit.weight)
    # A processor computes nothing while contexts run, in the forward and again.
    contexts = 2 * CONTEXT_SECONDS * len(calls) if speed.device.processor else 0.0
    again = sum(seconds for *_, seconds in calls) + contexts
    beyond = max(0.0, *(peak.on(tensor, sequence) for peak in (unit.forward_peak, unit.backward_peak)))
    return BlockCost(unit.name, inputs, everything, both, forward, backward, again, beyond, candidates, results)


def choose(costs: SavedCosts, budget: float) -> SavedPlan:
    """Return the fastest plan whose activations need at most ``budget`` bytes.

    Raises:
        ValueError: no plan needs so little; the text has the smallest budget that works.
    """
    best, least, fastest = None, inf, inf
    for plan in _plans(costs, budget):
        if costs.moved(plan) > costs.host:
            continue
        peak, seconds = costs.peak(plan), costs.seconds(plan)
        least = min(least, peak)
        if peak <= budget and seconds < fastest:
            best, fastest = plan, seconds
    if best is None:
        raise ValueError(
            f"activations may take {budget / 1e9:.6g} GB of a device, and no plan needs less than {bytes_text(least)}: "
            f"set {BUDGET} to {ceil(least / 1e3) / 1e6:.15g} or more, if the device has it, or choose a smaller "
            "micro-batch"
        )
    return best


def _plans(costs: SavedCosts, budget: float) -> list[SavedPlan]:
    """Return plans of which one is the fastest: the last blocks keep all, the others share one choice by their kind."""
    total, plans = len(costs.blocks), []
    for keeping in range(total, -1, -1):  # the first of equals is taken: without checkpoints
        # The last blocks keep all: their bytes are free again when earlier blocks are computed again.
        checkpointed = total - keeping
        tails = (BlockPlan(keeps_all=True),) * keeping
        for inputs in (Saved.KEEP, Saved.MOVE) if costs.link else (Saved.KEEP,):
            bare = SavedPlan((BlockPlan(inputs),) * checkpointed + tails)
            plans.append(bare)
            spare = budget - costs.peak(bare)
            if spare <= 0 or not checkpointed:
                continue
            plan_of_kind: dict[tuple[float, float, tuple[Candidate, ...]], BlockPlan] = {}
            # Blocks whose own backward is the peak have their kept results in it anyway: all that the later moments
            # leave is shared evenly; and less of it where that proves too much.
            ends = costs.before + sum(b.held(p) for b, p in zip(costs.blocks, bare.blocks, strict=True)) + costs.after
            most = min(spare, costs.link * max(min(block.forward, block.backward) for block in costs.blocks))
            for flying in {0.0, most / 2, most}:  # bytes of moves on their way
                for room in {spare - flying, max(0.0, budget - ends - flying)}:
                    chosen = []
                    for block in costs.blocks[:checkpointed]:
                        moved = block.inputs if inputs is Saved.MOVE else 0.0
                        # Beside the next block's forward on the way out, and beside its backward on the way back.
                        beside = min(flying, max(0.0, costs.link * min(block.forward, block.backward) - moved))
                        key = (room, beside, block.candidates)
                        if key not in plan_of_kind:
                            packed = pack(block.candidates, room / checkpointed, beside)
                            plan_of_kind[key] = BlockPlan(inputs, packed.choices)
                        chosen.append(plan_of_kind[key])
                    plans.append(SavedPlan((*chosen, *tails)))
    return plans


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


@dataclass(frozen=True)
class PlannedCost:
    """Cost of a model whose blocks follow a plan of saved tensors: ``Recompute.PLANNED`` stands for it."""

    source: CostSource
    costs: SavedCosts
    plan: SavedPlan

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.source.name

    def at(self, micro_batch: int, sequence: int, context: int = 1) -> ModelCost:
        """Return the cost of a micro-batch, of the size that the plan is for."""
        cost = self.source.at(micro_batch, sequence, context)
        pairs = zip(self.costs.blocks, self.plan.blocks, strict=True)
        chosen = {block.name: (block, choice) for block, choice in pairs}
        units = (_planned(unit, *chosen[unit.name]) if unit.name in chosen else unit for unit in cost.units)
        return replace(cost, units=tuple(units))


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
    settings: Settings, source: CostSource, sequence: int, layout: ParallelLayout, machine: Machine
) -> PlannedCost:
    """Return the cost of a run with the plan that its settings ask for; raise ValueError as ``choose``."""
    costs = saved_costs(
        source.at(layout.micro_batch * settings.rows_per_sample, sequence, layout.context), machine, layout
    )
    if settings.compile.enabled:
        costs = replace(costs, link=0.0)  # moves cannot be traced
    if (gigabytes := settings.activation_checkpointing.budget_gb) is not None:
        return PlannedCost(source, costs, choose(costs, gigabytes * 1e9))

    def left(of: CostSource, only: bool) -> float:
        """Return the bytes of a device that a run leaves, or its states alone."""
        ranks = memory_of(of, sequence, layout, machine)
        if only:
            ranks = [replace(rank, timeline=tuple(map(_without_activations, rank.timeline))) for rank in ranks]
        node = machine.nodes[0][0]
        sharing = min(node.devices, layout.ranks) if node.device.processor else 1  # ranks of a processor's memory
        # An allocator reserves more than it is asked for.
        return -lacking(ranks, layout, machine, 1 / (1 + reserved_margin()))["device"] / sharing

    budget = left(source, only=True)
    planned = PlannedCost(source, costs, choose(costs, budget))
    # States and activations are not at their most at the same moment: what is left is given to the plan.
    for _ in range(ROUNDS):
        budget += left(planned, only=False)
        more = PlannedCost(source, costs, choose(costs, budget))
        if left(more, only=False) < 0:
            break
        planned = more
    return planned


def _without_activations(moment: Moment) -> Moment:
    states = {name: size for name, size in moment.bytes.items() if name not in ("activation", "temporary")}
    return Moment(moment.label, states)


WHY = {
    Saved.KEEP: "many seconds for its bytes",
    Saved.MOVE: "the link has time for it",
    Saved.RECOMPUTE: "few seconds for its bytes",
}


def explained_plan(costs: SavedCosts, plan: SavedPlan) -> list[str]:
    """Return lines that list the choices of a plan: operator, bytes, seconds, choice, and why."""
    moved = f", {bytes_text(costs.moved(plan))} on the host" if costs.moved(plan) else ""
    lines = [
        f"activations at the peak: {bytes_text(costs.peak(plan))}{moved}; computed again: "
        f"{costs.seconds(plan) * 1e3:.3g} ms of each micro-batch"
    ]
    pairs = [*zip(costs.blocks, plan.blocks, strict=True)]
    for _, alike in groupby(pairs, key=lambda pair: (pair[1], pair[0].candidates)):
        (block, choice), *others = alike
        name = f"{block.name} to {others[-1][0].name}" if others else block.name
        if choice.keeps_all:
            lines.append(f"{name}: keeps all {bytes_text(block.everything)}, free when earlier blocks need bytes")
            continue
        lines.append(f"{name}: inputs of {bytes_text(block.inputs)}: {choice.inputs.value}")
        for item in sorted(block.candidates, key=lambda x: -x.seconds / x.size):
            fate = choice.results.get(item.key, Saved.RECOMPUTE)
            operator = f"{item.key[0].partition('::')[2]} {item.key[1]}"
            amounts = (
                f"{bytes_text(item.size):>9} {item.seconds * 1e6:9.1f} us {1e9 * item.seconds / item.size:9.3g} s/GB"
            )
            lines.append(f"  {operator:<40} {amounts}  {fate.value}: {WHY[fate]}")
    return lines
