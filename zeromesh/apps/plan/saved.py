"""Plan for what blocks leave for their backward: each operator's result is kept, computed again or moved to the host.

A recomputation runs every operator of a block whose result is not there, so the seconds of operators add up, and the
choice is a knapsack: seconds saved, bytes on the device, and bytes that the link moves beside the computation.

Sources: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022; Dantzig,
"Discrete-Variable Extremum Problems", 1957 (the bound of the relaxation).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, islice, pairwise
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
from zeromesh.apps.plan.predict.pipeline_step import stage_units
from zeromesh.apps.plan.predict.rank_memory import Moment, late_bytes, memory_of
from zeromesh.apps.plan.predict.snapshots import Snapshot, snapshots_of
from zeromesh.base.saved_tensors import BlockPlan, Saved
from zeromesh.base.words import bytes_text
from zeromesh.config.settings import Settings
from zeromesh.parallel.pipeline.schedule.actions import Kind

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
    late: float  # bytes that are kept while only gradients of weights are still to be computed
    candidates: tuple[Candidate, ...]
    results: tuple[tuple[tuple[str, int], float, float], ...]  # by operator: bytes that autograd keeps, and others
    is_received: bool = False  # its inputs are another stage's, and stay on the device in any case

    def held(self, plan: BlockPlan) -> float:
        """Return the bytes that stay on the device between its forward and its backward."""
        if plan.keeps_all:
            return self.everything
        kept_bytes = sum(x.size for x in self.candidates if plan.results.get(x.key) is Saved.KEEP)
        return kept_bytes + (0.0 if plan.inputs is Saved.MOVE and not self.is_received else self.inputs)

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


Plans = Sequence[BlockPlan]  # of blocks in the order of the forward


@dataclass(frozen=True)
class StageCosts:
    """Blocks of a pipeline stage, and bytes of what lies around them, for one micro-batch."""

    blocks: tuple[BlockCost, ...]
    before: float  # kept
    after: float  # kept
    passing: float  # at most beyond, in the passes of what lies behind the blocks
    late: float  # kept while only gradients of weights are still to be computed
    messages: float = 0.0  # to and from other ranks, on their way

    def held(self, plans: Plans) -> float:
        """Return the bytes that stay on the device between its forward and its backward."""
        return self.before + sum(map(BlockCost.held, self.blocks, plans)) + self.after

    def peak(self, plans: Plans, splits: bool = False) -> float:
        """Return the most bytes at one time; ``splits`` if gradients of weights are computed after those of inputs."""
        held_bytes, highest, flying, late = self.before, 0.0, 0.0, self.late if splits else 0.0
        for block, plan in zip(self.blocks, plans, strict=True):
            # Beside a block, what the one before moves is still leaving in the forward, and comes back in the backward.
            beside = 0.0 if plan.keeps_all else flying  # the recomputation asks for it
            late = max(0.0, late - block.late)
            highest = max(highest, held_bytes + block.at_work(plan) + beside + late)
            held_bytes, flying = held_bytes + block.held(plan), block.moved(plan)
        return max(highest, held_bytes + self.after + self.passing + flying)


@dataclass(frozen=True)
class SavedCosts:
    """Stages of one rank, in bytes; ``link`` is bytes per second to the host, 0 without."""

    stages: tuple[StageCosts, ...]
    snapshots: tuple[Snapshot, ...]
    link: float = 0.0
    host: float = inf  # bytes that may wait on the host

    @cached_property
    def blocks(self) -> tuple[BlockCost, ...]:
        """Blocks of all stages."""
        return tuple(block for stage in self.stages for block in stage.blocks)

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """The most micro-batches that a block's stage holds, by block."""
        most = [max(counts) for counts in zip(*(shot.held for shot in self.snapshots), strict=True)]
        return tuple(max(1, count) for stage, count in zip(self.stages, most, strict=True) for _ in stage.blocks)

    def _most(self, plans: Plans, working: Callable[[StageCosts, Plans, bool], float]) -> float:
        """Return the most bytes at one time, by those of the micro-batch that a stage computes."""
        following = iter(plans)
        parts = [(stage, tuple(islice(following, len(stage.blocks)))) for stage in self.stages]
        held = [stage.held(part) for stage, part in parts]
        kinds = {(shot.chunk, shot.kind) for shot in self.snapshots}
        computed = {(chunk, kind): working(*parts[chunk], kind is Kind.INPUT) for chunk, kind in kinds}
        most = 0.0
        for shot in self.snapshots:
            counts = zip(shot.held, shot.late, held, self.stages, strict=True)
            others = sum((count - late) * size + late * stage.late for count, late, size, stage in counts)
            others -= 0.0 if shot.kind is Kind.FORWARD else held[shot.chunk]  # it is among those that are held
            most = max(most, others + computed[shot.chunk, shot.kind])
        return most + sum(stage.messages for stage in self.stages)

    def peak(self, plans: Plans) -> float:
        """Return the most bytes of activations and gradients of activations at one time."""
        return self._most(plans, StageCosts.peak)

    def kept(self, plans: Plans) -> float:
        """Return the most bytes that wait for backwards at one time."""
        return self._most(plans, lambda stage, part, _: stage.held(part))

    def moved(self, plans: Plans) -> float:
        """Return the bytes that wait on the host."""
        moved_bytes = map(BlockCost.moved, self.blocks, plans)
        return sum(count * size for count, size in zip(self.in_flight, moved_bytes, strict=True))

    def seconds(self, plans: Plans) -> float:
        """Return the seconds that the plans compute again in a micro-batch."""
        return sum(map(BlockCost.again, self.blocks, plans))


def saved_costs(
    cost: ModelCost, machine: Machine, layout: ParallelLayout | None = None, places: Sequence[range] | None = None
) -> list[SavedCosts]:
    """Return what the blocks of a model cost, by pipeline rank of a layout, by default of one rank.

    Args:
        cost: of a micro-batch.
        machine: of the run.
        layout: sizes of axes.
        places: of each stage's units; None: as the planner cuts the model.

    Raises:
        ValueError: the model could not be traced, or has no stack of like blocks.
    """
    layout, units = layout or ParallelLayout(), cost.units
    if not any(unit.calls for unit in units):
        reason = cost.note or "it has no stack of like blocks, or only its sizes are known"
        raise ValueError(
            f"what {cost.name} saves for its backward cannot be planned: {reason}; set "
            'activation_checkpointing.granularity to "full" or "selective"'
        )
    node = machine.nodes[0][0]
    speed = KernelSpeed(node.device, layout, Habits())
    link = 0.0 if node.device.processor else wire(node.host, 1).bandwidth
    places = places or stage_units(units, layout.pipeline * layout.chunks)
    snapshots = snapshots_of(layout.schedule, layout.pipeline, layout.accumulation, layout.chunks, layout.costs)
    return [
        SavedCosts(
            tuple(_stage(speed, units, places, stage, indices) for stage in indices),
            shots,
            link,
            node.host_memory / node.devices,
        )
        for indices, shots in snapshots
    ]


def _stage(
    speed: KernelSpeed, units: Sequence[UnitCost], places: Sequence[range], stage: int, local_stages: Sequence[int]
) -> StageCosts:
    layout, place = speed.layout, places[stage]

    def on(amount: Divided) -> float:
        return amount.on(layout.tensor, layout.sequence)

    blocks = [number for number in place if units[number].calls]
    last = blocks[-1] if blocks else place.stop
    kept = {number: on(units[number].saved[Recompute.NONE]) for number in place}
    before = sum(size for number, size in kept.items() if number < last and number not in blocks)
    after = sum(size for number, size in kept.items() if number > last)
    behind = units[last + 1 : place.stop]
    passing = max((on(peak) for unit in behind for peak in (unit.forward_peak, unit.backward_peak)), default=0)
    # What a stage is given waits on the device until its backward, as its first block's inputs, and so does what it
    # gives. Gradients that were sent are held until the messages are waited for.
    messages = 0.0
    if stage > 0 and stage - 1 not in local_stages:
        messages = on(units[place.start - 1].output) * (1 + min(layout.accumulation, 2 * len(places) + 2))
    if stage + 1 < len(places):
        output = on(units[place.stop - 1].output)
        passing += output
        if stage + 1 not in local_stages:  # otherwise it is that stage's
            after, messages = after + output, messages + output
    traced = [_block(speed, units[number]) for number in blocks]
    if stage > 0 and blocks:
        traced[0] = replace(traced[0], is_received=True)
    late = sum(late_bytes(units[number], layout) for number in place)
    return StageCosts(tuple(traced), before, after, passing, late, messages)


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
    late = late_bytes(unit, speed.layout)
    return BlockCost(unit.name, inputs, everything, both, forward, backward, again, beyond, late, candidates, results)


def choose(costs: SavedCosts, budget: float) -> Plans:
    """Return the fastest plans of a rank's blocks whose activations need at most ``budget`` bytes.

    Raises:
        ValueError: no plan needs so little; the text has the smallest budget that works.
    """
    best, least, fastest = None, inf, inf
    for plans in _plans(costs, budget):
        if costs.moved(plans) > costs.host:
            continue
        peak, seconds = costs.peak(plans), costs.seconds(plans)
        least = min(least, peak)
        if peak <= budget and seconds < fastest:
            best, fastest = plans, seconds
    if best is None:
        raise ValueError(
            f"activations may take {budget / 1e9:.6g} GB of a device, and no plan needs less than {bytes_text(least)}: "
            f"set {BUDGET} to {ceil(least / 1e3) / 1e6:.15g} or more, if the device has it, or choose a smaller "
            "micro-batch"
        )
    return best


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
            most = min(spare, costs.link * max(min(block.forward, block.backward) for block in costs.blocks))
            for flying in {0.0, most / 2, most}:  # bytes of moves on their way
                for room in {spare - flying, max(0.0, left - flying)}:
                    chosen = []
                    for block in costs.blocks[:checkpointed]:
                        moved = block.inputs if inputs is Saved.MOVE else 0.0
                        # Beside the next block's forward on the way out, and beside its backward on the way back.
                        beside = min(flying, max(0.0, costs.link * min(block.forward, block.backward) - moved))
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
    costs = saved_costs(cost, machine, layout, None if firsts is None else places_of(cost, firsts))
    if settings.compile.enabled:
        costs = [replace(rank, link=0.0) for rank in costs]  # moves cannot be traced

    def chosen(budgets: Sequence[float]) -> PlannedCost:
        plans = map(choose, costs, budgets)
        return PlannedCost(source, tuple(map(RankPlan, costs, plans)))

    if (gigabytes := settings.activation_checkpointing.budget_gb) is not None:
        return chosen([gigabytes * 1e9] * len(costs))

    def left(of: CostSource, only: bool) -> list[float]:
        """Return the bytes of a device that each pipeline rank of a run leaves, or its states alone."""
        ranks = memory_of(of, sequence, layout, machine)
        if only:
            ranks = [replace(rank, timeline=tuple(map(_without_activations, rank.timeline))) for rank in ranks]
        node = machine.nodes[0][0]
        sharing = min(node.devices, layout.ranks) if node.device.processor else 1  # ranks of a processor's memory
        # An allocator reserves more than it is asked for.
        share = 1 / (1 + reserved_margin())
        return [-lacking([rank], layout, machine, share)["device"] / sharing for rank in ranks]

    budgets = left(source, only=True)
    planned = chosen(budgets)
    # States and activations are not at their most at the same moment: what is left is given to the plan.
    for _ in range(ROUNDS):
        budgets = [budget + more for budget, more in zip(budgets, left(planned, only=False), strict=True)]
        larger = chosen(budgets)
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
