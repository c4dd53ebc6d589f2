"""Lower bounds of a layout's step time and memory: cheap, so that a search can leave most layouts uncomputed.

A bound assumes that everything that may overlap does.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from math import ceil, gcd
from operator import attrgetter, mul
from typing import NamedTuple

from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
from zeromesh.apps.plan.cost.cost import CostSource, ModelCost, UnitCost
from zeromesh.apps.plan.machine.calibration import calibration_on
from zeromesh.apps.plan.machine.cluster import Device, Machine
from zeromesh.apps.plan.machine.rates import Habits
from zeromesh.apps.plan.predict.durations import Durations, UnitTime
from zeromesh.base.placement import Placement, Tier
from zeromesh.parallel.pipeline.schedule.generators import ROWS as SCHEDULES
from zeromesh.parallel.pipeline.schedule.generators import Shape

MOVES = (*("gather", "reduce", "replicas", "fetch", "read", "update", "host_update", "states_read", "states_written"),)
"""Seconds of states, of ``UnitTime``."""

EXPOSED = 0.4  # share of traffic that a pipeline does not hide; it decides about the order of a search alone


def best_rate(device: Device, width: int) -> float:
    """Return the most operations per second in products of elements of ``width`` bytes."""
    names = ("bf16", "fp16") if width == 2 else ("tf32", "fp32")
    rates = [device.flops[name] for name in names if name in device.flops]
    # A device whose table lacks the dtype computes no faster than its fastest entry.
    return max(rates or device.flops.values())


def slowest(machine: Machine) -> Device:
    """Return the device that the others wait for: the one with the lowest rate."""
    return min((node.device for node, _ in machine.nodes), key=lambda device: best_rate(device, 2))


def least_memory(machine: Machine) -> float:
    """Return the bytes of the smallest device."""
    return min(node.device.memory for node, _ in machine.nodes)


def devices_of_a_node(machine: Machine) -> int:
    """Return the devices of the smallest node."""
    return min(node.devices for node, _ in machine.nodes)


class _Kinds(NamedTuple):
    """Units of a model, of which those that are alike are there once."""

    cost: ModelCost
    counts: tuple[int, ...]


def _kinds(cost: ModelCost) -> _Kinds:
    # By formula the blocks of a stack share their parts, which are then compared once; in a trace parts are only equal.
    same: dict[tuple[object, ...], list[UnitCost]] = {}
    for unit in cost.units:
        parts = unit.block, unit.forward, unit.input, unit.weight, unit.saved, unit.parameters, unit.output
        same.setdefault((*map(id, parts), unit.joins, unit.frozen, unit.tables), []).append(unit)
    kinds: dict[tuple[object, ...], list[UnitCost]] = {}
    for unit, *others in same.values():
        kernels = unit.forward, unit.input, unit.weight
        amounts = unit.parameters, unit.frozen, unit.joins, unit.output, unit.tables
        key = *kernels, unit.block, *amounts, *unit.saved.items()
        kinds.setdefault(key, []).extend([unit, *others])
    units = tuple(alike[0] for alike in kinds.values())
    return _Kinds(replace(cost, units=units), tuple(map(len, kinds.values())))


class _Elements(NamedTuple):
    """Elements with gradients, and bytes of others, without those in units of experts."""

    elements: float
    block: float  # of the smallest block
    frozen: float
    frozen_block: float
    experts: float  # in units of experts
    frozen_experts: float


class TimeBound:
    """Least step time and memory of layouts of one model on one machine, from the same seconds as ``time_of``."""

    def __init__(self, source: CostSource, sequence: int, machine: Machine) -> None:
        self.source = source
        self.sequence = sequence
        self.machine = machine
        self._passes: dict[tuple[object, ...], tuple[float, float]] = {}
        self._moves: dict[tuple[object, ...], UnitTime] = {}
        self._known: dict[tuple[int, int], _Kinds] = {}
        self._saved: dict[tuple[object, ...], float] = {}
        self._parameters: dict[tuple[int, int], _Elements] = {}
        self._device = slowest(machine)
        self._factor = calibration_on(machine, experts=self.experts > 0).factor

    def _at(self, micro_batch: int, context: int) -> _Kinds:
        """Return the model's units; its cost is asked for once."""
        key = micro_batch, context
        if key not in self._known:
            self._known[key] = _kinds(self.source.at(micro_batch, self.sequence, context))
        return self._known[key]

    @cached_property
    def blocks(self) -> int:
        """Blocks between which a pipeline can be cut."""
        cost, counts = self._at(1, 1)
        return sum(count for unit, count in zip(cost.units, counts, strict=True) if unit.block)

    @cached_property
    def experts(self) -> int:
        """Largest number that divides the experts of every block that has some; 0: none has."""
        return gcd(*(unit.experts.number for unit in self._at(1, 1).cost.units if unit.experts))

    def seconds(self, layout: ParallelLayout) -> float:
        """Return a time that no run of the layout is expected to be shorter than."""
        return max(self.compute(layout), self.traffic(layout), self.offload(layout))

    def compute(self, layout: ParallelLayout) -> float:
        """Return seconds of the slowest stage, with the pipeline's idle time and sums that nothing hides."""
        total, block = self._passes_of(layout)
        mean = total / layout.pipeline
        # One of the ranks has at least so many blocks.
        most = ceil(self.blocks / layout.pipeline) * block
        return self._factor * layout.accumulation * (max(mean, most) + self.bubble(layout) * mean)

    def expected(self, layout: ParallelLayout, compute: float, traffic: float, offload: float) -> float:
        """Return a time near that of a layout, from its bounds: it orders layouts, and leaves none out."""
        # The update waits for the host, and a pipeline's messages hide only a part of its gathers and reductions.
        return compute + offload + (EXPOSED * traffic if layout.pipeline > 1 else 0.0)

    def bubble(self, layout: ParallelLayout) -> float:
        """Return idle time of the schedule in parts of busy time, at the least."""
        if layout.pipeline == 1:
            return 0.0
        row = SCHEDULES[layout.schedule]
        shape = Shape(layout.pipeline, layout.accumulation, layout.chunks, layout.pipeline)
        # The formulas are for three equal parts of a micro-batch and equal stages; others may be idle for less.
        filled = float(row.bubble(shape)) * (0.5 if row.split else 0.9)
        # Too few micro-batches to fill the pipeline leave a forward of a stage idle for each that is missing.
        missing = max(0, row.full(shape) - layout.accumulation)
        return filled + missing / (3 * layout.accumulation * layout.chunks)

    def traffic(self, layout: ParallelLayout) -> float:
        """Return seconds that the links between data-parallel ranks are in use."""
        moves, row = self._moves_of(layout), layout.row
        reductions = layout.accumulation if row.gradient is Placement.SHARDED else 1
        # With more than two slots some parameters stay from one micro-batch to the next; with all of them, all.
        again = row.parameter is Placement.SHARDED and layout.parameter_slots <= 2
        gathers = layout.accumulation if again else 1
        seconds = reductions * moves.reduce + gathers * moves.gather + moves.replicas
        return self._factor * seconds / layout.pipeline

    def offload(self, layout: ParallelLayout) -> float:
        """Return seconds of the host's update, or of copies to and from the host and disks."""
        moves = self._moves_of(layout)
        passes = 1 if layout.parameter_slots >= self.blocks / layout.pipeline else layout.accumulation
        files = moves.states_read + moves.states_written
        busy = moves.update, moves.host_update, files, passes * moves.fetch, passes * moves.read
        return self._factor * max(busy) / layout.pipeline

    def states(self, layout: ParallelLayout) -> float:
        """Return bytes on the device that states alone take on the average rank, with the context of the device."""
        row, widths, group = layout.row, layout.widths, layout.data * layout.context
        sizes = self._elements(layout.tensor, layout.expert_shares)
        # Elements of a stage, and in parts of the groups that shard them: those of experts have groups of their own.
        stage_elements = (sizes.elements + sizes.experts) / layout.pipeline
        shard_elements = (sizes.elements / group + sizes.experts / layout.expert_data) / layout.pipeline
        left = 1.0 if row.optimizer_tier is Tier.DEVICE else 1.0 - row.offloaded
        updated = shard_elements if row.optimizer is Placement.SHARDED else stage_elements
        total = updated * (widths.master + widths.states) * left
        if row.parameter_tier is Tier.DEVICE:
            is_sharded = row.parameter is Placement.SHARDED
            total += (shard_elements if is_sharded else stage_elements) * widths.parameter
            frozen = sizes.frozen / group + sizes.frozen_experts / layout.expert_data
            total += (frozen if is_sharded else sizes.frozen + sizes.frozen_experts) / layout.pipeline
        if row.parameter is Placement.SHARDED:
            # Gradients grow as activations shrink, so they are left out; gathered blocks are there all the time.
            slots = min(layout.parameter_slots, self.blocks // layout.pipeline)
            total += slots * (sizes.block * widths.parameter + sizes.frozen_block)
        elif row.gradient is Placement.REPLICATED:
            total += stage_elements * min(widths.gradient, widths.wire)
        elif row.gradient_tier is Tier.DEVICE:
            total += shard_elements * widths.gradient * left
        return total + self._device.reserved

    def activations(self, layout: ParallelLayout) -> float:
        """Return bytes that one micro-batch of the average stage keeps for its backward, at the least."""
        if layout.activations_on_host:
            return 0.0
        key = layout.micro_batch, layout.context, layout.tensor, layout.sequence, layout.recompute
        if key not in self._saved:
            cost, counts = self._at(layout.micro_batch, layout.context)
            self._saved[key] = 0.0
            for unit, count in zip(cost.units, counts, strict=True):
                if unit.block:
                    self._saved[key] += unit.kept(layout.recompute).on(layout.tensor, layout.sequence) * count
        # Stages hold unlike numbers of blocks, so the rank that holds most micro-batches may have fewer than the mean.
        in_flight = held(layout) / layout.chunks
        return self._saved[key] / layout.pipeline * max(1.0, 0.8 * in_flight)

    def _elements(self, tensor: int, shares: int) -> _Elements:
        """Return the amounts of a tensor rank; each of ``shares`` ranks has one share of the experts."""
        if (tensor, shares) not in self._parameters:
            cost, counts = self._at(1, 1)
            sizes, experts = zip(*(unit.elements(tensor, shares) for unit in cost.units), strict=True)
            frozen, expert_frozen, _ = zip(*(unit.frozen_bytes(tensor, shares) for unit in cost.units), strict=True)
            amounts: list[float] = []
            for per_unit in (sizes, frozen):
                least = min((size for size, unit in zip(per_unit, cost.units, strict=True) if unit.block), default=0.0)
                amounts += [sum(map(mul, per_unit, counts)), least]
            in_units = [sum(map(mul, sizes, counts)) for sizes in (experts, expert_frozen)]
            self._parameters[tensor, shares] = _Elements(*amounts, *in_units)
        return self._parameters[tensor, shares]

    def _passes_of(self, layout: ParallelLayout) -> tuple[float, float]:
        """Return the seconds of a micro-batch on one rank: of the whole model, and of its largest block."""
        mesh = layout.tensor, layout.context, layout.pipeline, layout.expert, layout.sequence
        key = *mesh, layout.micro_batch, layout.recompute, layout.widths
        if key not in self._passes:
            cost, counts = self._at(layout.micro_batch, layout.context)
            units = Durations(layout, self.machine, Habits()).units(cost)
            # Without lookups of tables, which depend on the number of data ranks, and waits for updates of experts.
            alone = [unit._replace(lookup=0.0, rows=0.0, rows_again=0.0) for unit in units]
            times = [sum(s for _, s in (*u.compute_forward, *u.compute_backward)) for u in alone]
            block = max((seconds for unit, seconds in zip(units, times, strict=True) if unit.block), default=0.0)
            self._passes[key] = sum(map(mul, times, counts)), block
        return self._passes[key]

    def _moves_of(self, layout: ParallelLayout) -> UnitTime:
        # All units are taken to be off the device; where a part of them is, the device's update of the rest is short.
        row, share = layout.row, 1.0
        if row.optimizer_tier is not Tier.DEVICE:
            row, share = replace(row, offloaded=1.0), row.offloaded
        mesh = layout.tensor, layout.context, layout.pipeline, layout.data, layout.replicate, layout.expert
        key = *mesh, row, layout.widths, layout.accumulation > 1
        if key not in self._moves:
            # States do not depend on the size of a micro-batch.
            cost, counts = self._at(1, 1)
            units = Durations(replace(layout, micro_batch=1, row=row), self.machine, Habits()).units(cost)
            totals = {name: sum(map(mul, map(attrgetter(name), units), counts)) for name in MOVES}
            self._moves[key] = UnitTime("all units", False, **totals)
        moves = self._moves[key]
        away = ("host_update", "states_read", "states_written", "fetch", "read")
        return moves if share == 1 else moves._replace(**{name: share * getattr(moves, name) for name in away})


def held(layout: ParallelLayout) -> int:
    """Return micro-batches of one stage that the fullest rank of the pipeline holds."""
    if layout.pipeline == 1:
        return 1
    shape = Shape(layout.pipeline, layout.accumulation, layout.chunks, layout.pipeline)
    row = SCHEDULES[layout.schedule]
    return max(row.held(shape, rank) for rank in (0, layout.pipeline - 1))
