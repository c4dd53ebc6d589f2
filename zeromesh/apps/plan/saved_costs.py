"""Bytes and seconds of what blocks leave for their backward, by block, pipeline stage and rank, under a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from math import inf
from typing import NamedTuple

from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
from zeromesh.apps.plan.cost.cost import Divided, ModelCost, Recompute, UnitCost
from zeromesh.apps.plan.machine.cluster import Machine
from zeromesh.apps.plan.machine.collective_times import wire
from zeromesh.apps.plan.machine.rates import Habits, KernelSpeed
from zeromesh.apps.plan.predict.durations import CONTEXT_SECONDS
from zeromesh.apps.plan.predict.pipeline_step import stage_units
from zeromesh.apps.plan.predict.snapshots import Snapshot, late_bytes, snapshots_of
from zeromesh.base.saved_tensors import BlockPlan, Saved
from zeromesh.parallel.pipeline.schedule.actions import Kind


class Candidate(NamedTuple):
    """An operator whose result may be kept or moved."""

    key: tuple[str, int]
    size: float  # bytes
    seconds: float  # to compute it again


@dataclass(frozen=True)
class BlockCost:
    """Bytes and seconds of one block."""

    name: str
    inputs: float  # bytes that the block keeps to be computed again
    everything: float  # bytes that it keeps without a checkpoint
    recomputed: float  # bytes of both, when it has been computed again
    passing: float  # seconds of its forward or its backward, without a recomputation, whichever is shorter
    recomputation: float  # seconds, with nothing kept
    transient: float  # bytes beyond, at most, in its passes
    late: float  # bytes that are kept while only gradients of weights are still to be computed
    candidates: tuple[Candidate, ...]
    results: tuple[tuple[tuple[str, int], float, float], ...]  # by operator: bytes, and those beyond ``everything``
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
        """Return the bytes of its recomputation beyond ``transient``: results of the plan wait there to be taken."""
        ahead, most = 0.0, self.transient
        for key, size, live in () if plan.keeps_all else reversed(self.results):
            most = max(most, live + ahead)
            ahead += size if key in plan.results else 0.0
        return most - self.transient

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
        held_bytes = [stage.held(part) for stage, part in parts]
        kinds = {(shot.chunk, shot.kind) for shot in self.snapshots}
        computed = {(chunk, kind): working(*parts[chunk], kind is Kind.INPUT) for chunk, kind in kinds}
        most = 0.0
        for shot in self.snapshots:
            counts = zip(shot.held, shot.late, held_bytes, self.stages, strict=True)
            others = sum((count - late) * size + late * stage.late for count, late, size, stage in counts)
            others -= 0.0 if shot.kind is Kind.FORWARD else held_bytes[shot.chunk]  # it is among those that are held
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
    kept_bytes = {number: on(units[number].saved[Recompute.NONE]) for number in place}
    before = sum(size for number, size in kept_bytes.items() if number < last and number not in blocks)
    after = sum(size for number, size in kept_bytes.items() if number > last)
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
    results = tuple((call.key, size, call.beyond.on(tensor, sequence)) for call, size, *_ in calls)
    policies = Recompute.BLOCKS, Recompute.NONE, Recompute.PLANNED
    inputs, everything, both = (unit.saved[policy].on(tensor, sequence) for policy in policies)
    passing = min(speed.total(unit.forward), speed.total(unit.input, True) + speed.total(unit.weight))
    # A processor computes nothing while contexts run, in the forward and again.
    contexts = 2 * CONTEXT_SECONDS * len(calls) if speed.device.processor else 0.0
    again = sum(seconds for *_, seconds in calls) + contexts
    beyond = max(0.0, *(peak.on(tensor, sequence) for peak in (unit.forward_peak, unit.backward_peak)))
    late = late_bytes(unit, speed.layout)
    return BlockCost(unit.name, inputs, everything, both, passing, again, beyond, late, candidates, results)
