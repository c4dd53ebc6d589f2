"""Lower bounds of a layout's step time and memory: cheap, so that a search can leave most layouts uncomputed.

A bound assumes that everything that may overlap does, and that every kernel and link runs at its best rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from zeromesh.model.placement import Placement, Tier
from zeromesh.pipeline.schedule.generators import ROWS as SCHEDULES
from zeromesh.pipeline.schedule.generators import Shape
from zeromesh.plan.cost import CostSource, KernelWork, ModelCost, Recompute, WorkKind
from zeromesh.plan.layout import ParallelLayout
from zeromesh.plan.machine import Device, Machine

PRODUCTS = (WorkKind.PRODUCT, WorkKind.CONVOLUTION, WorkKind.ATTENTION)
"""Kinds of work that the device's rate for matrix products bounds."""


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


@dataclass(frozen=True)
class _Passes:
    """Seconds of a model's parts on one rank for one micro-batch, at the best rates."""

    total: float  # of forward and backward, of all units
    again: float  # of the forward of blocks
    block: float  # of forward and backward of the largest block
    block_again: float
    joins: float  # bytes that tensor ranks sum in the forward


class TimeBound:
    """Least step time of layouts of one model on one machine."""

    def __init__(self, source: CostSource, sequence: int, machine: Machine) -> None:
        self.source = source
        self.sequence = sequence
        self.machine = machine
        self._passes: dict[tuple[int, int, int, bool, int], _Passes] = {}
        self._costs: dict[tuple[int, int], ModelCost] = {}
        self._parameters: dict[int, tuple[float, float, int]] = {}
        self._device = slowest(machine)
        self._node = min(machine.nodes, key=lambda kind: kind[0].devices)[0]

    def cost(self, micro_batch: int, context: int) -> ModelCost:
        """Return the model's cost; it is asked for once."""
        key = micro_batch, context
        if key not in self._costs:
            self._costs[key] = self.source.at(micro_batch, self.sequence, context)
        return self._costs[key]

    def seconds(self, layout: ParallelLayout) -> float:
        """Return a time that no run of the layout can be shorter than."""
        return max(self.compute(layout), self.traffic(layout), self.offload(layout))

    def compute(self, layout: ParallelLayout) -> float:
        """Return seconds of the slowest stage, with the pipeline's idle time and sums that nothing hides."""
        passes = self._of(layout)
        again = layout.recompute is Recompute.BLOCKS
        blocks = sum(unit.block for unit in self.cost(layout.micro_batch, layout.context).units)
        mean = (passes.total + again * passes.again) / layout.pipeline
        # One of the ranks has at least so many blocks.
        most = ceil(blocks / layout.pipeline) * (passes.block + again * passes.block_again)
        tensor = passes.joins / layout.pipeline
        # Sums of the backward hide behind weight gradients; those of the forward do not.
        exposed = 2 * one_way(tensor, layout.tensor, self._node.inside.bandwidth)
        busy = layout.accumulation * (max(mean, most) + exposed)
        return busy * (1 + self.bubble(layout))

    def bubble(self, layout: ParallelLayout) -> float:
        """Return idle time of the schedule in parts of busy time, at the least."""
        if layout.pipeline == 1:
            return 0.0
        row = SCHEDULES[layout.schedule]
        shape = Shape(layout.pipeline, layout.accumulation, layout.chunks, layout.pipeline)
        # Formulas hold for three equal parts of a micro-batch, and recomputation makes the bubble no smaller.
        return float(row.bubble(shape)) * (0.75 if row.split else 1.0)

    def traffic(self, layout: ParallelLayout) -> float:
        """Return seconds that the busiest link between data-parallel ranks is in use."""
        own = self._own(layout) * layout.widths.wire
        group, row = layout.data * layout.context, layout.row
        below = layout.tensor * layout.context * layout.pipeline
        times = 0.0
        if group > 1:
            # Ranks of the group that share a node have inner links, so only the share between nodes is slow.
            count, speed = self._link(below, layout.data)
            times += _rounds(layout) * one_way(own, count, speed)
        if layout.replicate > 1:
            share = own / group if row.optimizer is Placement.SHARDED else own
            count, speed = self._link(below * layout.data, layout.replicate)
            times += 2 * one_way(share, count, speed)
        return times

    def offload(self, layout: ParallelLayout) -> float:
        """Return seconds of the host's update, or of copies to and from the host and disks."""
        row, own, node = layout.row, self._own(layout), self._node
        group = layout.data * layout.context
        sharing = node.devices
        found = [0.0]
        if row.optimizer_tier is not Tier.DEVICE:
            elements = own / group * row.offloaded
            states = layout.widths.states + layout.widths.master
            # The update reads and writes masters and states, and reads gradients (Ren et al., ZeRO-Offload, 2021).
            found.append(elements * sharing * (2 * states + layout.widths.gradient) / node.host_bandwidth)
            found.append(elements * layout.widths.wire / node.host.bandwidth)
            if row.optimizer_tier is Tier.NVME and node.disk_read:
                written = node.disk_write or node.disk_read
                found.append(elements * sharing * states * (1 / node.disk_read + 1 / written))
        if row.parameter_tier is not Tier.DEVICE:
            passes = 1 if layout.parameter_slots >= self._blocks(layout) else 2 * layout.accumulation
            found.append(passes * own / group * layout.widths.parameter / node.host.bandwidth)
            if row.parameter_tier is Tier.NVME and node.disk_read:
                found.append(passes * own / group * sharing * layout.widths.parameter / node.disk_read)
        return max(found)

    def states(self, layout: ParallelLayout) -> float:
        """Return bytes on the device that states alone take on the average rank, with the context of the device."""
        row, widths = layout.row, layout.widths
        own, group = self._own(layout), layout.data * layout.context
        left = 1.0 if row.optimizer_tier is Tier.DEVICE else 1.0 - row.offloaded
        total = own * (widths.master + widths.states) * left / _shards(row.optimizer, group)
        if row.parameter_tier is Tier.DEVICE:
            total += own * widths.parameter / _shards(row.parameter, group)
        if row.gradient is Placement.REPLICATED:
            total += own * min(widths.gradient, widths.wire)
        elif row.gradient_tier is Tier.DEVICE:
            total += own * widths.gradient / group * left
        return total + self._device.reserved

    def activations(self, layout: ParallelLayout) -> float:
        """Return bytes that one micro-batch of the average stage keeps for its backward, at the least."""
        cost = self.cost(layout.micro_batch, layout.context)
        if layout.activations_on_host:
            return 0.0
        kept = [unit.saved.get(layout.recompute) or unit.saved.get(Recompute.NONE) for unit in cost.units if unit.block]
        saved = sum(amount.on(layout.tensor, layout.sequence) for amount in kept if amount is not None)
        # Stages hold unlike numbers of blocks, so the rank that holds most micro-batches may have fewer than the mean.
        in_flight = held(layout) / layout.chunks
        return saved / layout.pipeline * max(1.0, 0.8 * in_flight)

    def _own(self, layout: ParallelLayout) -> float:
        """Return elements of parameters of the average rank before sharding."""
        tensor = layout.tensor
        if tensor not in self._parameters:
            units = self.cost(1, 1).units
            total = sum(unit.parameters.on(tensor) for unit in units)
            self._parameters[tensor] = total, 0.0, sum(unit.block for unit in units)
        return self._parameters[tensor][0] / layout.pipeline

    def _blocks(self, layout: ParallelLayout) -> float:
        self._own(layout)
        return self._parameters[layout.tensor][2] / layout.pipeline

    def _link(self, below: int, ranks: int) -> tuple[int, float]:
        """Return the nodes or ranks that a group of ranks ``below`` apart joins, and the bytes per second it has."""
        inside = max(1, self._node.devices // below)
        if ranks <= inside:
            return ranks, self._node.inside.bandwidth
        # At best each node sends its ranks' data once, over the links of all of them; other groups use theirs.
        return max(2, ranks // inside), self.machine.between.bandwidth * inside / self.machine.between.shared

    def _of(self, layout: ParallelLayout) -> _Passes:
        key = layout.micro_batch, layout.context, layout.tensor, layout.sequence, layout.widths.parameter
        if key not in self._passes:
            self._passes[key] = self._count(layout)
        return self._passes[key]

    def _count(self, layout: ParallelLayout) -> _Passes:
        cost = self.cost(layout.micro_batch, layout.context)
        rate = best_rate(self._device, layout.widths.parameter) * self._device.product_efficiency
        known: dict[int, tuple[float, float]] = {}
        for unit in cost.units:  # blocks of a stack are often one object, or equal
            if id(unit) not in known:
                forward = self._unit(unit.forward, rate, layout)
                both = forward + self._unit(unit.input, rate, layout) + self._unit(unit.weight, rate, layout)
                known[id(unit)] = both, forward
        blocks = [unit for unit in cost.units if unit.block]
        largest = max((known[id(unit)] for unit in blocks), default=(0.0, 0.0))
        return _Passes(
            sum(known[id(unit)][0] for unit in cost.units),
            sum(known[id(unit)][1] for unit in blocks),
            largest[0],
            largest[1],
            sum(unit.joins for unit in cost.units),
        )

    def _unit(self, works: tuple[KernelWork, ...], rate: float, layout: ParallelLayout) -> float:
        device = self._device
        total = 0.0
        for work in works:
            flops = work.flops.on(layout.tensor, layout.sequence)
            moved = work.moved.on(layout.tensor, layout.sequence)
            at_best = moved / (device.bandwidth * device.memory_efficiency) if work.kind not in PRODUCTS else 0.0
            total += work.count * max(flops / rate if work.kind in PRODUCTS else 0.0, at_best)
        return total


def _shards(placement: Placement, group: int) -> int:
    return group if placement is Placement.SHARDED else 1


def _rounds(layout: ParallelLayout) -> float:
    """Return how often a rank's parameters, or gradients of that size, go over its links in one direction in a step.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.
    """
    reductions = layout.accumulation if layout.row.gradient is Placement.SHARDED else 1
    # With more than two slots some parameters stay from one micro-batch to the next; with all of them, all.
    gathers = layout.accumulation if layout.row.parameter is Placement.SHARDED and layout.parameter_slots <= 2 else 1
    return reductions + gathers


def one_way(size: float, ranks: int, speed: float) -> float:
    """Return seconds of a gather or a reduce-scatter; an all-reduce takes both (Patarasuk and Yuan, 2009)."""
    return size * (ranks - 1) / ranks / speed


def held(layout: ParallelLayout) -> int:
    """Return micro-batches of one stage that the fullest rank of the pipeline holds."""
    if layout.pipeline == 1:
        return 1
    shape = Shape(layout.pipeline, layout.accumulation, layout.chunks, layout.pipeline)
    row = SCHEDULES[layout.schedule]
    return max(row.held(shape, rank) for rank in (0, layout.pipeline - 1))
