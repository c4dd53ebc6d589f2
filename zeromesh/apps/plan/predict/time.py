"""Time of one step of a layout on a machine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
from zeromesh.apps.plan.cost.cost import CostSource, ModelCost
from zeromesh.apps.plan.machine.calibration import UNCALIBRATED, Calibration, calibration_on
from zeromesh.apps.plan.machine.cluster import Machine
from zeromesh.apps.plan.machine.rates import Habits
from zeromesh.apps.plan.predict import step_clock as streams
from zeromesh.apps.plan.predict.durations import Durations, UnitTime
from zeromesh.apps.plan.predict.pipeline_step import Run, StageCost, pipelined, placement_of, stage_units
from zeromesh.parallel.pipeline.schedule.generators import ROWS

PIPELINE = "pipeline"  # what a rank waits for others of its pipeline


class Interval(NamedTuple):
    """Use of one resource of one pipeline rank, for a picture of the step."""

    rank: int
    resource: str  # "compute", "tensor links", "data links", "host link", "host", "disk", ...
    label: str
    start: float  # seconds
    end: float


@dataclass(frozen=True)
class StepTime:
    """Time of a step."""

    seconds: float
    waits: Mapping[str, float]  # seconds by resource that the slowest rank computes with or waits for; their sum
    intervals: tuple[Interval, ...] = ()
    flops: float = 0.0  # model's operations of all ranks
    calibration: Calibration = UNCALIBRATED  # included in all times

    @property
    def interval(self) -> tuple[float, float]:
        """Seconds between which eight of ten such runs are expected."""
        return self.seconds * self.calibration.low, self.seconds * self.calibration.high

    @property
    def bound(self) -> str:
        """The resource with most seconds."""
        return max(self.waits, key=lambda name: self.waits[name])


def time_of(
    source: CostSource,
    sequence: int,
    layout: ParallelLayout,
    machine: Machine,
    *,
    habits: Habits | None = None,
    intervals: bool = False,
) -> StepTime:
    """Return the time of one step: of all micro-batches, of communication that is not hidden, and of the update.

    The step is one of many: it begins with the update for which the step before has made the gradients.

    Args:
        source: model.
        sequence: tokens of a sample.
        layout: sizes of all axes and choices of the run.
        machine: nodes and links; it may have more devices than the layout has ranks.
        habits: choices that a layout does not say; None: those of this library, with times calibrated by measured
            steps of the machine's GPU.
        intervals: return what each resource does when, for a picture.

    Raises:
        ValueError: the layout cannot run: too many ranks, fewer blocks than stages, a batch that the schedule does not
            divide, or a state on a disk that the machine lacks.
    """
    if layout.ranks > machine.devices:
        raise ValueError(
            f"the layout has {layout.ranks} ranks, but machine {machine.name or 'given'!r} has {machine.devices} "
            "devices; take smaller axes or more nodes"
        )
    cost = source.at(layout.micro_batch, sequence, layout.context)
    calibration = UNCALIBRATED
    if habits is None:
        habits, calibration = Habits(), calibration_on(machine, layout.ranks, cost.has_experts)
    durations = Durations(layout, machine, habits)
    units = durations.units(cost)
    if layout.pipeline > 1:
        seconds, waits, timeline = _pipeline(cost, units, durations, intervals)
    else:
        seconds, waits, timeline = _alone(units, durations, intervals)
    agreement = durations.world.all_reduce(4.0)  # the norm and overflow are agreed on before the update
    waits["agreement"] = agreement
    waits[streams.OVERHEAD] = waits.get(streams.OVERHEAD, 0.0) + habits.between
    if habits.spread > 0.0 and layout.ranks > 1:
        # Expected largest of n normal deviations, about sqrt(2 ln n) standard ones.
        waits["stragglers"] = seconds * habits.spread * math.sqrt(2 * math.log(layout.ranks))
    factor = calibration.factor
    waits = {name: factor * value for name, value in waits.items() if value > 0.0} or {"compute": 0.0}
    timeline = [part._replace(start=factor * part.start, end=factor * part.end) for part in timeline]
    flops = cost.flops * layout.context * layout.accumulation * layout.data * layout.replicate
    return StepTime(sum(waits.values()), waits, tuple(timeline), flops, calibration)


_Found = tuple[float, dict[str, float], list[Interval]]


def _alone(units: Sequence[UnitTime], durations: Durations, keep: bool) -> _Found:
    layout, habits = durations.layout, durations.habits
    rules = streams.StreamRules(
        durations.sharded,
        durations.split,
        durations.reduces_each,
        layout.parameter_slots,
        layout.gradient_slots,
        layout.accumulation,
        habits.reduces_early,
        habits.publishes_early,
        habits.overhead,
        durations.serial,
    )
    seconds, waits, intervals = streams.run(_contended(units, durations), rules, keep)
    return seconds, waits, [Interval(0, *interval) for interval in intervals]


def _contended(units: Sequence[UnitTime], durations: Durations) -> Sequence[UnitTime]:
    """Return the units with data links as slow as they are beside the tensor ranks' sums."""
    # Both use the links inside a node, if the shard group does not cross nodes: while a sum goes on, the other stops.
    if durations.layout.tensor == 1 or durations.shard.size == 1 or durations.shard.crosses != durations.tensor.crosses:
        return units
    busy = sum(unit.join + unit.join_back + unit.join_again for unit in units)
    total = busy + sum(unit.forward + unit.input + unit.weight + unit.again for unit in units)
    free = 1.0 - busy / total if total else 1.0
    return [unit._replace(gather=unit.gather / free, reduce=unit.reduce / free) for unit in units]


def _pipeline(cost: ModelCost, units: Sequence[UnitTime], durations: Durations, keep: bool) -> _Found:
    layout, habits = durations.layout, durations.habits
    chunks, row = layout.chunks, ROWS.get(layout.schedule)
    if row is not None:
        chunks = max(chunks, row.chunks[0])
    placement = placement_of(layout.schedule, layout.pipeline, layout.accumulation, chunks, keep, layout.costs)
    units = _contended(units, durations)
    places = stage_units(cost.units, len(placement), habits.even_stages)
    updates = [_Update() for _ in range(layout.pipeline)]
    messages = [durations.message(cost.units[indices[-1]]) for indices in places[:-1]] + [0.0]
    stages = []
    early = [
        updates[rank].release([units[p] for p in indices], durations)
        for rank, indices in zip(placement, places, strict=True)
    ]
    for stage, indices in enumerate(places):
        rank = placement[stage]
        count = sum(units[p].block for other, ps in enumerate(places) if placement[other] == rank for p in ps)
        # Where gathers do not go on beside computation, a rank's first forward waits for all of its stages'.
        release = (
            early[stage]
            if habits.publishes_early
            else max(seconds for seconds, other in zip(early, placement, strict=True) if other == rank)
        )
        stages.append(_stage([units[place] for place in indices], durations, count, release, messages[stage]))
    run = pipelined(layout.schedule, layout.pipeline, layout.accumulation, chunks, stages, keep, layout.costs)
    # Each rank ends when its last gradients are reduced; a framework may begin to when all of them are there.
    last = [0.0] * layout.pipeline
    if not habits.reduces_early:
        for stage, rank in enumerate(placement):
            last[rank] = max(last[rank], run.ends[stage])
    for stage in sorted(range(len(places)), key=lambda index: run.ends[index]):
        own_units = [units[place] for place in places[stage]]
        rank = placement[stage]
        last[rank] = max(run.ends[stage], _reduced(own_units, durations, run.ends[stage], last[rank]))
    replicas = [0.0] * layout.pipeline
    for stage, indices in enumerate(places):
        replicas[placement[stage]] += sum(units[place].replicas for place in indices)
    ends = [reduced + other for reduced, other in zip(last, replicas, strict=True)]
    seconds = max(ends)
    waits = _rank_waits(units, places, run, last, replicas, updates, messages, durations)
    waits[streams.OVERHEAD] = habits.overhead * layout.accumulation
    timeline = [Interval(rank, streams.COMPUTE, label, start, end) for rank, label, start, end in run.actions]
    if keep:
        for rank, update in enumerate(updates):
            done = max(run.ends[stage] for stage, here in enumerate(placement) if here == rank)
            timeline += [
                Interval(rank, streams.COMPUTE, "update", 0.0, update.device),
                Interval(rank, streams.HOST, "update", 0.0, update.host),
                Interval(rank, streams.DATA, "publish", max(update.device, update.host), update.sent),
                Interval(rank, streams.DATA, "reduce", done, last[rank]),
                Interval(rank, streams.REPLICAS, "sum over replicas", last[rank], ends[rank]),
            ]
        timeline = [interval for interval in timeline if interval.end > interval.start]
    return seconds + waits[streams.OVERHEAD], waits, timeline


class _Update:
    """Update of one pipeline rank's units, and gathers that follow."""

    def __init__(self) -> None:
        self.device = self.host = self.copied = self.sent = 0.0  # times until which each is busy

    def release(self, units: Sequence[UnitTime], durations: Durations) -> float:
        """Return the earliest time of the stage's first forward at which it waits for nothing."""
        self.device += sum(unit.update for unit in units)
        self.host += sum(max(unit.host_update, unit.states_read, unit.states_written) for unit in units)
        release, passed = max(self.device, self.host), 0.0
        for unit in units:
            moved = unit.parameter_in + max(unit.fetch, unit.read)
            self.copied = max(self.copied, self.host) + moved
            arrives = self.copied if moved else 0.0
            # Sharded parameters are gathered for the first micro-batch in any case.
            if durations.split:
                self.sent = max(self.sent, arrives, self.device, self.host) + unit.gather
                arrives = self.sent
            release = max(release, arrives - (passed if durations.habits.publishes_early else 0.0))
            passed += unit.forward + unit.join
        return release


def _stage(units: Sequence[UnitTime], durations: Durations, blocks: int, release: float, message: float) -> StageCost:
    """Return the seconds of a stage's actions; ``blocks`` of its rank share the slots."""
    forward = sum(seconds for unit in units for _, seconds in unit.compute_forward)
    weight = sum(unit.weight for unit in units)
    back = sum(seconds for unit in units for _, seconds in unit.compute_backward) - weight
    block_units = [unit for unit in units if unit.block]
    if durations.sharded:
        # Of the rank's blocks, those that have a slot stay from the first micro-batch to the last.
        missing = max(0.0, 1.0 - durations.layout.parameter_slots / blocks) if blocks else 0.0
        gathers = missing * sum(unit.gather for unit in block_units)
        fetched = missing * sum(max(unit.fetch, unit.read) for unit in block_units)
        serial = durations.serial > 0
        forward = forward + gathers + fetched if serial else max(forward, gathers, fetched)
        reduces = sum(unit.reduce for unit in block_units) if durations.reduces_each else 0.0
        back = back + gathers + reduces + fetched if serial else max(back, gathers + reduces - weight, fetched)
    elif durations.reduces_each:
        back = max(back, sum(unit.reduce for unit in block_units) - weight)
    if durations.reduces_each:
        back = max(back, sum(max(unit.gradient_out, unit.host_add) for unit in block_units) - weight)
    saved = sum(unit.saved_out for unit in block_units)
    forward, back = max(forward, saved), max(back, saved - weight)
    if (durations.habits.messages_block or durations.node.device.processor) and message:
        return StageCost(forward + message, back + message, weight, release, 0.0)
    return StageCost(forward, back, weight, release, message)


def _reduced(units: Sequence[UnitTime], durations: Durations, end: float, free: float) -> float:
    """Return the time at which a stage's gradients are reduced, whose last backward ends at ``end``."""
    if durations.reduces_each:
        rest = units[:1]  # those before went beside the backward
        return max(end, free) + sum(unit.reduce + unit.gradient_out for unit in rest)
    after = sum(sum(seconds for _, seconds in unit.compute_backward) for unit in units)
    moment = end - after if durations.habits.reduces_early else end
    sent = out = free
    for unit in reversed(units):
        if durations.habits.reduces_early:
            moment += sum(seconds for _, seconds in unit.compute_backward)
        sent = max(sent, moment) + unit.reduce
        out = max(out, sent) + unit.gradient_out
    return max(sent, out)


def _rank_waits(
    units: Sequence[UnitTime],
    places: Sequence[range],
    run: Run,
    last: Sequence[float],
    replicas: Sequence[float],
    updates: Sequence[_Update],
    messages: Sequence[float],
    durations: Durations,
) -> dict[str, float]:
    """Return what the rank that computes most spends a step on."""
    ranks, accumulation = len(updates), durations.layout.accumulation
    rank = max(range(ranks), key=lambda index: run.busy[index])
    waits: dict[str, float] = {}
    stages = [stage for stage, here in enumerate(run.placement) if here == rank]
    for place in (place for stage in stages for place in places[stage]):
        for resource, seconds in (*units[place].compute_forward, *units[place].compute_backward):
            waits[resource] = waits.get(resource, 0.0) + seconds * accumulation
    # What a stage's actions take beyond its computation are gathers and reductions that it waits for, and messages.
    computed = sum(waits.values())
    if durations.habits.messages_block:
        computed += sum(2 * messages[stage] for stage in stages) * accumulation
    waits[streams.DATA] = max(0.0, run.busy[rank] - computed) + max(last) - run.makespan
    waits[streams.COMPUTE] += updates[rank].device
    waits[streams.HOST] = updates[rank].host
    waits[streams.REPLICAS] = max(replicas)
    end = max(reduced + other for reduced, other in zip(last, replicas, strict=True))
    waits[PIPELINE] = max(0.0, end - sum(waits.values()))
    excess = sum(waits.values()) - end
    if excess > 0.0:  # the largest parts of several ranks are no parts of one
        waits[streams.DATA] = max(0.0, waits[streams.DATA] - excess)
    return waits
