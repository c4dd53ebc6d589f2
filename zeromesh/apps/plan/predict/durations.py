"""Seconds of a unit's kernels, joins and copies on one rank of a layout."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
from zeromesh.apps.plan.cost.cost import KernelWork, ModelCost, Recompute, UnitCost, WorkKind
from zeromesh.apps.plan.machine.cluster import Machine, Node
from zeromesh.apps.plan.machine.collective_times import Fabric, Wire, fabric, wire
from zeromesh.apps.plan.machine.rates import Habits, KernelSpeed, dtype_on
from zeromesh.apps.plan.predict import table_bytes
from zeromesh.base.placement import Placement, Tier, offloaded_units

# Python's time for an operator, with the views beside it, in the contexts of selective recomputation; measured with
# torch 2.13 on an AMD EPYC as 25 us for each of a decoder's 81 calls and a GPT-2's 37 in a block.
CONTEXT_SECONDS = 4e-5


class UnitTime(NamedTuple):
    """Seconds of one unit; those of messages are of the whole unit's."""

    name: str
    block: bool
    forward: float = 0.0
    input: float = 0.0
    weight: float = 0.0
    again: float = 0.0  # recomputation
    join: float = 0.0  # sums of the tensor ranks that are waited for in the forward
    join_back: float = 0.0  # in the backward
    join_again: float = 0.0  # in the recomputation
    exchange: float = 0.0  # of keys and values that is waited for in the forward
    exchange_back: float = 0.0
    dispatch: float = 0.0  # of tokens to the ranks of their experts and back that is waited for in the forward
    dispatch_back: float = 0.0  # in the backward, with its recomputation
    lookup: float = 0.0  # of rows of tables, from the ranks that have them, which the forward waits for
    rows: float = 0.0  # of experts that rest, fetched from the host or the disk: what the forward waits for
    rows_again: float = 0.0  # in the recomputation
    rows_update: float = 0.0  # update of experts that rest; what is waited for of it is in ``rows``
    gather: float = 0.0  # of its parameters over the shard group
    reduce: float = 0.0  # of its gradients
    replicas: float = 0.0  # sum of its gradients over replicas
    fetch: float = 0.0  # of its parameters' shard from the host
    read: float = 0.0  # of its parameters' shard from the disk
    update: float = 0.0  # on the device
    host_update: float = 0.0
    states_read: float = 0.0  # of its optimizer state from the disk
    states_written: float = 0.0
    gradient_out: float = 0.0  # copy of its gradients' shard to the host
    host_add: float = 0.0  # addition of them to the sum over micro-batches on the host
    parameter_in: float = 0.0  # copy of its updated parameters' shard to the device
    saved_out: float = 0.0  # copy of its activations to the host; as long back

    @property
    def compute_forward(self) -> tuple[tuple[str, float], ...]:
        """Parts of the forward by the resource that is busy."""
        return (
            ("compute", self.forward),
            ("tensor links", self.join),
            ("context links", self.exchange),
            ("expert links", self.dispatch),
            ("data links", self.lookup),
            ("from host", self.rows),
        )

    @property
    def compute_backward(self) -> tuple[tuple[str, float], ...]:
        """Parts of the backward, with its recomputation."""
        return (
            ("compute", self.again + self.input + self.weight),
            ("tensor links", self.join_back + self.join_again),
            ("context links", self.exchange_back),
            ("expert links", self.dispatch_back),
            ("from host", self.rows_again),
        )


_OF_TABLES = "lookup", "rows", "rows_again", "rows_update"


class Durations:
    """Seconds of the units of a model under a layout on a machine."""

    def __init__(self, layout: ParallelLayout, machine: Machine, habits: Habits) -> None:
        self.layout, self.machine, self.habits = layout, machine, habits
        # All ranks wait for the slowest, so the slowest kind of node counts.
        nodes = [node for node, _ in machine.nodes]
        self.node: Node = min(nodes, key=lambda node: node.device.flops[dtype_on(node.device, habits.dtype)])
        self.speed = KernelSpeed(self.node.device, layout, habits)
        group = partial(fabric, layout, machine, order=habits.order)
        self.tensor, self.context, self.expert = group("tensor"), group("context"), group("expert")
        self.shard = group("data", "context").on_rails(habits.rails)
        self.expert_data = group("expert_data").on_rails(habits.rails)
        self.replicas = group("replicate").on_rails(habits.rails)
        self.pipeline = group("pipeline")
        self.host: Wire = wire(self.node.host, min(self.node.devices, layout.ranks))
        self._known: dict[tuple[object, ...], UnitTime] = {}
        row = layout.row
        self.sharded = row.parameter is Placement.SHARDED
        self.reduces_each = row.gradient is Placement.SHARDED and not habits.sums_once  # after each micro-batch
        self.split = row.optimizer is Placement.SHARDED
        # Messages of a processor take it as long as they take between ranks of a host; the rest is the link's.
        self.serial = 0.0
        if self.node.device.processor:
            inside, between = self.shard.inside.bandwidth, self.shard.between.bandwidth
            self.serial = min(1.0, between / inside) if self.shard.crosses else 1.0

    def units(self, cost: ModelCost) -> list[UnitTime]:
        """Return the seconds of all units, in the order of the forward."""
        outside = sum(unit.parameters.on() for unit in cost.units if not unit.block)
        sizes = [outside, *(unit.parameters.on() for unit in cost.units if unit.block)]
        of_root, *of_blocks = offloaded_units(sizes, self.layout.row, self.layout.accumulation > 1)
        blocks, times = iter(of_blocks), []
        for unit in cost.units:
            away = next(blocks) if unit.block else of_root
            # Blocks of a stack share their tuples of kernels; one of them is computed.
            amounts = unit.parameters, unit.frozen, unit.joins, unit.output, unit.tables, unit.experts
            key = (id(unit.forward), id(unit.weight), unit.again, *amounts, away)
            if key not in self._known:
                self._known[key] = self._unit(unit, away)
            unit_time = self._known[key]
            times.append(unit_time if unit_time.name == unit.name else unit_time._replace(name=unit.name))
        return self._beside(times) if self.layout.resting else times

    def _beside(self, units: list[UnitTime]) -> list[UnitTime]:
        """Return the units with the seconds that computation waits for rows of experts.

        Rows of a layer are fetched while another one computes, and all are updated during the first forward; not by a
        processor, which does everything itself.
        """
        free = 0.0 if self.node.device.processor else 1.0
        forwards = [free * (sum(seconds for _, seconds in unit.compute_forward) - unit.rows) for unit in units]
        backs = [free * (sum(seconds for _, seconds in unit.compute_backward) - unit.rows_again) for unit in units]
        update = sum(unit.rows_update for unit in units)
        idle = sum(max(0.0, forward - unit.rows) for unit, forward in zip(units, forwards, strict=True))
        share = max(0.0, 1 - idle / update) / self.layout.accumulation if update else 0.0
        return [
            unit._replace(
                rows=max(0.0, unit.rows - forward) + share * unit.rows_update,
                rows_again=max(0.0, unit.rows_again - back),
            )
            for unit, forward, back in zip(units, forwards, backs, strict=True)
        ]

    def _unit(self, unit: UnitCost, away: bool) -> UnitTime:
        layout, device, speed = self.layout, self.node.device, self.speed
        forward, back, weight = speed.total(unit.forward), speed.total(unit.input, True), speed.total(unit.weight)
        again, joins_again = self._again(unit, forward)
        again += speed.total(unit.again)
        join = self._join(unit)
        attention = 0.0
        if not self.serial:  # exchanges go on beside it
            attention = speed.total(work for work in unit.forward if work.kind is WorkKind.ATTENTION)
        exchange, swap = self._exchange(unit)
        dense, experts = unit.elements(layout.tensor, layout.expert_shares)
        frozen, expert_frozen, _ = unit.frozen_bytes(layout.tensor, layout.expert_shares)
        states = self._states(dense, frozen, away, self.shard)
        others = [self._tables(unit)]
        if experts or expert_frozen:
            others.append(self._states(experts, expert_frozen, away, self.expert_data))
        for name, seconds in (pair for part in others for pair in part.items()):
            states[name] = states.get(name, 0.0) + seconds
        states["saved_out"] = self._saved_out(unit)
        dispatch = self._dispatch(unit)
        repeated = layout.recompute.repeats
        # A weight's gradient is read and added to the sum over micro-batches.
        widths = layout.widths
        moved = (dense + experts) * (widths.parameter + 2 * widths.gradient)
        weight += device.streaming_seconds(moved)
        # Hidden sums take the time of the computation that they lie beside, if there is so much of it.
        visible = max(join * (1 - self.habits.joins_hidden), join - forward)
        hidden = self.habits.joins_hidden_back * (0.5 if layout.sequence else 1.0)
        visible_back = max(join * (1 - hidden), join - weight)
        return UnitTime(
            unit.name,
            unit.block,
            forward,
            back,
            weight,
            again,
            visible,
            visible_back,
            visible * joins_again,
            max(0.0, exchange - attention) + swap,
            (2 + repeated) * max(0.0, exchange - attention) + (1 + repeated) * swap,
            dispatch,
            dispatch * (2 if repeated else 1),
            **states,
        )

    def _again(self, unit: UnitCost, forward: float) -> tuple[float, float]:
        """Return the seconds of recomputation, and how often the sums of tensor ranks are made again."""
        layout = self.layout
        if not unit.block or layout.recompute is Recompute.NONE:
            return 0.0, 0.0
        if layout.recompute is Recompute.BLOCKS:
            return forward, 1.0
        if layout.recompute is Recompute.PLANNED and not unit.repeated:
            return 0.0, 0.0
        if layout.recompute in (Recompute.PRODUCTS, Recompute.PLANNED):
            planned = layout.recompute is Recompute.PLANNED
            seconds = self.speed.total(
                unit.repeated if planned else (work for work in unit.forward if not _is_kept(work))
            )
            # A processor computes nothing while torch's contexts run, in the forward and again.
            calls = sum(work.count for work in unit.forward) if self.node.device.processor else 0
            return seconds + 2 * CONTEXT_SECONDS * calls, 1.0
        # A fused kernel computes scores again in any case: that is in the time of its backward.
        scores = [work for work in unit.forward if work.kind is WorkKind.ATTENTION]
        if not any(work.shape for work in scores):
            scores = []
        return self.speed.total(scores) + self.habits.selective * forward, 0.0

    def _join(self, unit: UnitCost) -> float:
        if self.layout.tensor == 1 or not unit.joins:
            return 0.0
        messages = 2 if unit.block else 1
        size = unit.joins / messages
        if self.layout.sequence:
            return messages * (self.tensor.reduce_scatter(size) + self.tensor.all_gather(size))
        return messages * self.tensor.all_reduce(size)

    def _exchange(self, unit: UnitCost) -> tuple[float, float]:
        """Return the seconds in a forward of keys and values that go round groups of context ranks, and of swaps.

        The ranks of a group swap queries, keys and values for those of some heads, and results back.
        """
        layout, sharing = self.layout, self.layout.ulysses
        if layout.context == 1 or not unit.block:
            return 0.0, 0.0
        # A trace does not say the keys' and values' bytes: without grouped heads they are twice the output's.
        output = unit.output.on(layout.tensor, True)
        size = unit.exchanged.on(layout.tensor) or 2 * output
        group = replace(self.context, size=sharing, local=min(self.context.local, sharing))
        swap = group.all_to_all(output + size) + group.all_to_all(output)
        return (layout.context // sharing - 1) * self.context.send(size), swap

    def _dispatch(self, unit: UnitCost) -> float:
        """Return the seconds in which a forward sends tokens to the ranks of their experts, and results back."""
        experts, layout, habits = unit.experts, self.layout, self.habits
        if experts is None or layout.expert == 1:
            return 0.0
        rows = experts.tokens * experts.row * habits.uneven * layout.expert_split / layout.tensor
        across = None
        copies = float(experts.chosen) if habits.copies == "expert" else experts.ranks_of_token(layout.expert)
        if habits.copies == "node" and self.expert.crosses:
            across = rows * experts.ranks_of_token(min(self.expert.nodes, experts.number))
        return 2 * self.expert.all_to_all(copies * rows, across) * (1 - habits.exchanges_hidden)

    def _states(self, elements: float, frozen: float, away: bool, shard: Fabric) -> dict[str, float]:
        """Return the seconds of messages, copies and updates of states that are sharded over the ranks ``shard``.

        ``elements`` are those with gradients, and ``frozen`` the bytes of others.
        """
        layout, row, widths, node = self.layout, self.layout.row, self.layout.widths, self.node
        ranks = shard.size if self.split else 1
        local_elements = elements / ranks
        seconds: dict[str, float] = {}
        gathered = elements * (widths.gathered or widths.parameter) + (frozen if self.sharded else 0.0)
        seconds["gather"] = shard.all_gather(gathered) if self.split else 0.0
        wires = elements * widths.wire
        seconds["reduce"] = shard.reduce_scatter(wires) if self.split else shard.all_reduce(wires)
        if node.device.processor:
            seconds["reduce"] += self._sums(elements, shard.size)
        seconds["replicas"] = self.replicas.all_reduce(local_elements * widths.wire)
        sharing = min(node.devices, layout.ranks)
        if self.sharded and row.parameter_tier is not Tier.DEVICE:
            size = (away * elements * widths.parameter + frozen) / shard.size
            seconds["fetch"] = self._copy(size)
            if row.parameter_tier is Tier.NVME:
                seconds["read"] = table_bytes.disk_seconds(node.disk_read, size * sharing, node.name)
        state = widths.states + widths.master
        if not (away and row.optimizer_tier is not Tier.DEVICE):
            # The update reads the gradient and reads and writes the master and the states; it writes the parameter.
            seconds["update"] = node.device.streaming_seconds(
                local_elements * (widths.gradient + 2 * state + widths.parameter)
            )
            return seconds
        # The norm and then the fused kernel read a gradient as it was sent, or the sum over micro-batches; the kernel
        # writes a parameter: 30 or 34 bytes for Adam.
        summed = widths.gradient if layout.accumulation > 1 else widths.wire
        moved = local_elements * (2 * summed + 2 * state + widths.parameter)
        seconds["host_update"] = self.habits.host_traffic * moved * sharing / node.host_bandwidth
        seconds["gradient_out"] = self._copy(local_elements * widths.wire)
        if layout.accumulation > 1 and self.reduces_each and not node.device.processor:
            seconds["host_add"] = local_elements * (widths.wire + 2 * widths.gradient) * sharing / node.host_bandwidth
        if row.parameter_tier is Tier.DEVICE:
            seconds["parameter_in"] = self._copy(local_elements * widths.parameter)
        if row.optimizer_tier is Tier.NVME:
            seconds["states_read"] = table_bytes.disk_seconds(
                node.disk_read, local_elements * state * sharing, node.name
            )
            seconds["states_written"] = table_bytes.disk_seconds(
                node.disk_write or node.disk_read, local_elements * state * sharing, node.name
            )
        return seconds

    def _tables(self, unit: UnitCost) -> dict[str, float]:
        """Return the seconds of a unit's tables: of lookups, of gradients at the end of a step, and of the update."""
        layout, seconds = self.layout, dict.fromkeys((*_OF_TABLES, "replicas", "update"), 0.0)
        sharing = min(self.node.devices, layout.ranks)
        away = 1 - 1 / self.shard.size  # messages to all others take the time of a gather of as much
        for table in unit.tables:
            looked, summed = table_bytes.lookup_bytes(table, layout), table_bytes.gradient_messages(table, layout)
            if away:
                seconds["lookup"] += self.shard.all_gather(looked.indices / away) + self.shard.all_gather(
                    looked.rows / away
                )
                seconds["replicas"] += self.shard.all_gather((summed.indices + summed.gradients) / away)
            if summed.copies:
                seconds["replicas"] += self.replicas.all_gather(
                    summed.copies * layout.replicate / (layout.replicate - 1)
                )
            if table.experts:
                fetch, update = (
                    moved.seconds(self.node, sharing) for moved in table_bytes.expert_traffic(table, layout)
                )
                rows = max(fetch[:2]) + fetch[2]  # some are read while those before are copied
                seconds["rows"] += rows
                seconds["rows_again"] += rows if layout.recompute.repeats else 0.0
                seconds["rows_update"] += update[0] + update[2]
                seconds["update"] += update[1]  # the backward waits until its gradients are on the host
                continue
            moved = table_bytes.moved_by_update(table, layout)
            if layout.tables.tier is Tier.DEVICE:
                seconds["update"] += self.node.device.streaming_seconds(moved)
            else:
                seconds["update"] += moved * sharing / self.node.host_bandwidth
        return seconds

    def _sums(self, trained: float, ranks: int) -> float:
        """Return the seconds in which a processor adds other ranks' parts of gradients, and converts what it sends."""
        widths = self.layout.widths
        if ranks == 1:
            return 0.0
        moved = 3 * widths.wire * trained / ranks * (ranks - 1)
        if widths.wire != widths.gradient and not self.reduces_each:
            moved += (widths.wire + widths.gradient) * trained * (1 if self.split else 2)
        return self.node.device.streaming_seconds(moved)

    def _saved_out(self, unit: UnitCost) -> float:
        # What a unit saves for its backward leaves behind the forward, and comes back before the backward.
        if not self.layout.activations_on_host or not unit.block:
            return 0.0
        return self._copy(unit.kept(self.layout.recompute).on(self.layout.tensor, self.layout.sequence))

    def _copy(self, size: float) -> float:
        return self.host.latency + size / self.host.bandwidth if size > 0 else 0.0

    def message(self, unit: UnitCost) -> float:
        """Return the seconds of a unit's output on the way to the next pipeline rank."""
        size = unit.output.on(self.layout.tensor, self.layout.sequence)
        if self.habits.messages_scattered and not self.layout.sequence:
            return self.pipeline.send(size / self.layout.tensor) + self.tensor.all_gather(size)
        return self.pipeline.send(size)

    @property
    def world(self) -> Fabric:
        """All ranks."""
        return fabric(self.layout, self.machine, "replicate", "data", "context", "pipeline", "tensor")


def _is_kept(work: KernelWork) -> bool:
    """Return whether selective checkpointing keeps a kernel's result; that of unfused attention it does not."""
    return work.kind in (WorkKind.PRODUCT, WorkKind.CONVOLUTION) or (
        work.kind is WorkKind.ATTENTION and work.shape is None and work.flops.on() > 0
    )
