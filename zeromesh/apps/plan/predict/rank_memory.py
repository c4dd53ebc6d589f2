"""Memory of each pipeline rank of a layout: states by tier, and the device's over the moments of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import ceil
from typing import NamedTuple

from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
from zeromesh.apps.plan.cost.cost import CostSource, Recompute, TableCost, UnitCost, WorkKind
from zeromesh.apps.plan.machine.cluster import Machine
from zeromesh.apps.plan.predict.conventions import ZEROMESH, Convention
from zeromesh.apps.plan.predict.pipeline_step import stage_units
from zeromesh.apps.plan.predict.snapshots import Snapshot, late_bytes, snapshots_of
from zeromesh.apps.plan.predict.table_bytes import row_gradients, table_states
from zeromesh.comm.ordered_sums import SumPlace
from zeromesh.parallel.head.linear_cross_entropy import chunk_bytes
from zeromesh.parallel.pipeline.schedule.actions import Kind
from zeromesh.shard.layout import padded
from zeromesh.shard.sizes import GradientBuffers, RankStates, UnitElements

SEGMENT = 2.0**21  # bytes of which the caching allocator of CUDA makes large segments a multiple


class Moment(NamedTuple):
    """Device memory at one moment of a step, by what it is for; the sum is what is allocated."""

    label: str  # such as "backward of block 3, micro-batch 2"
    bytes: Mapping[str, float]  # by state: parameter, gradient, optimizer, slot, activation, temporary

    @property
    def total(self) -> float:
        """All bytes."""
        return sum(self.bytes.values())


@dataclass(frozen=True)
class RankMemory:
    """Memory of one pipeline rank; the ranks of the other axes have the same."""

    pipeline_rank: int
    states: Mapping[tuple[str, str], float]  # bytes by state and tier ("device", "host", "nvme")
    timeline: tuple[Moment, ...]  # of one step, on the device
    fixed: float  # bytes of the device's context, libraries and communicators
    reserved: float = 0.0  # bytes that the caching allocator of the device takes for the timeline's peak

    @property
    def peak(self) -> Moment:
        """The moment with most bytes."""
        return max(self.timeline, key=lambda moment: moment.total)

    @property
    def device(self) -> float:
        """Bytes that the device must have."""
        return self.peak.total + self.fixed

    def on(self, tier: str) -> float:
        """Bytes of states on the host or on NVMe."""
        return sum(size for (_, where), size in self.states.items() if where == tier)


def memory_of(
    source: CostSource,
    sequence: int,
    layout: ParallelLayout,
    machine: Machine | None = None,
    conventions: Convention = ZEROMESH,
    sums: SumPlace | None = None,
    places: Sequence[range] | None = None,
) -> list[RankMemory]:
    """Return the memory of every pipeline rank.

    Args:
        source: cost of the model.
        sequence: tokens of a sample.
        layout: sizes of axes and choices.
        machine: devices, whose context is counted; None: it is left out.
        conventions: what is kept of each state; by default as the engine does.
        sums: where gradients are summed; None: where such a machine does.
        places: of each stage's units; None: as the planner cuts the model.

    Raises:
        ValueError: the pipeline has more stages than the model has blocks, or the schedule does not fit the layout.
    """
    units = source.at(layout.micro_batch, sequence, layout.context).units
    profiles = _profiles(units, layout, conventions)
    places = places or stage_units(units, layout.pipeline * layout.chunks, even=not conventions.engine)
    stages = [_runs(profiles, place) for place in places]
    processor = any(node.device.processor for node, _ in machine.nodes) if machine else False
    if sums is None and processor and machine:
        # Ranks of one node read each other's memory, as long as ``communication.local_memory`` lets them.
        sums = SumPlace.MEMORY if sum(count for _, count in machine.nodes) == 1 else SumPlace.MESSAGES
    fixed = max((node.device.reserved for node, _ in machine.nodes), default=0.0) if machine else 0.0
    snapshots = snapshots_of(layout.schedule, layout.pipeline, layout.accumulation, layout.chunks, layout.costs)
    states: dict[tuple[UnitElements, ...], RankStates] = {}  # most ranks of a pipeline have the same
    memories = []
    for rank, (indices, shots) in enumerate(snapshots):
        chunks = [stages[stage] for stage in indices]
        elements = _elements(chunks, layout.expert_data)
        if elements not in states:
            states[elements] = conventions.states(elements, layout, sums or SumPlace.COLLECTIVE)
        tables = [table for runs in chunks for unit, count in runs for table in unit.tables * count]
        resting = table_states(tables, layout, processor)
        resting |= {key: resting.get(key, 0.0) + size for key, size in states[elements].resting.items()}
        widened = 0.0 if processor and layout.by_rules else states[elements].widened  # its update is one pass
        own_states = replace(states[elements], resting=resting, widened=widened)
        of_rows = sum(row_gradients(table, layout) for table in tables)
        memories.append(_Rank(chunks, own_states, layout, conventions, of_rows).memory(rank, shots, fixed))
    return memories


class _Profile(NamedTuple):
    """Amounts of one unit on one rank of the tensor axis."""

    name: str
    block: bool
    parameters: float  # elements with gradients, without those of experts
    experts: float  # elements of a unit of experts inside of it
    expert: float  # elements of one of them
    frozen: float  # bytes of others that rest, and are gathered, with them
    expert_frozen: float  # bytes of others in the unit of experts
    stays: float  # of those, the root's
    replicated: float  # bytes of them on every rank
    resident: float  # of them, those that stay gathered
    single: bool  # the others are one tensor, which the engine does not pad
    largest: float  # elements
    shared: float
    saved: float  # bytes, under the layout's policy
    again: float  # bytes that the backward computes again before it begins
    forward: float
    backward: float
    early: float  # bytes, as ``backward`` with gradients that autograd has made, before one is accumulated; 0: unknown
    gradients: float  # from the first that is accumulated on
    late: float  # of gradients of products' outputs, which are kept for gradients of weights that are computed later
    output: float
    tables: tuple[TableCost, ...]


def _profiles(units: Sequence[UnitCost], layout: ParallelLayout, convention: Convention) -> list[_Profile]:
    """Return the amounts of all units."""
    # Blocks of one shape share the parts of their costs, so most are worked out once.
    profiles_by_key: dict[tuple[object, ...], _Profile] = {}
    alike: dict[tuple[object, ...], _Profile] = {}  # those of equal amounts are one object, too
    profiles = []
    for unit in units:
        amounts = unit.saved, unit.parameters, unit.forward_peak, unit.backward_peak
        key = (*map(id, amounts), unit.frozen, unit.block, unit.tables)
        profile = profiles_by_key.get(key)
        if profile is None:
            profile = _profile(unit, layout)
            if convention.engine and layout.tensor > 1:
                profile = _in_chunks(unit, profile, layout)
            profile = profiles_by_key[key] = alike.setdefault(profile[1:] if unit.block else profile, profile)
        profiles.append(profile)
    return profiles


def _profile(unit: UnitCost, layout: ParallelLayout) -> _Profile:
    tensor, sequence = layout.tensor, layout.sequence
    policy = layout.recompute if layout.recompute in unit.saved else Recompute.NONE
    saved = unit.saved[policy].on(tensor, sequence) if policy in unit.saved else 0.0
    again = unit.saved[Recompute.NONE].on(tensor, sequence) - saved if policy is not Recompute.NONE else 0.0
    late = late_bytes(unit, layout)
    if layout.recompute.repeats:
        late = max(0.0, late - saved)  # beyond what is saved
    parameters, experts = unit.elements(tensor, layout.expert_shares)
    frozen, expert_frozen, replicated = unit.frozen_bytes(tensor, layout.expert_shares)
    elements = parameters - unit.resident.on(tensor)
    single = unit.single and padded(elements, layout.widths.parameter, layout.data * layout.context) <= elements
    return _Profile(
        unit.name,
        unit.block,
        parameters,
        experts,
        experts * layout.expert / unit.experts.number if unit.experts else 0.0,
        frozen,
        expert_frozen,
        unit.frozen.resident.on(tensor),
        replicated,
        unit.resident.on(tensor),
        single,
        unit.largest.on(tensor),
        unit.shared.on(tensor),
        saved,
        max(0.0, again),
        unit.forward_peak.on(tensor, sequence),
        unit.backward_peak.on(tensor, sequence),
        unit.early_peak.on(tensor, sequence),
        unit.gradient_peak.on(tensor, sequence),
        late,
        unit.output.on(tensor, sequence),
        unit.tables,
    )


def _in_chunks(unit: UnitCost, profile: _Profile, layout: ParallelLayout) -> _Profile:
    """Return the amounts of a unit whose head and loss are computed chunk by chunk, where its vocabulary is divided."""
    heads = [work for work in unit.forward if work.shape and work.divided == "columns"]
    if unit.block or not heads or not any(work.kind is WorkKind.LOSS for work in unit.forward):
        return profile
    tokens, vocabulary, width = max((work.shape for work in heads if work.shape), key=lambda shape: shape[1])
    local_vocabulary, widths = vocabulary / layout.tensor, layout.widths
    # Adapters train beside a frozen head: no gradient of it is computed, and none summed.
    trains = unit.frozen.elements < vocabulary * width or unit.parameters.on() >= vocabulary * width
    chunk = min(chunk_bytes(local_vocabulary, width, sums=trains), 4 * tokens * local_vocabulary)
    narrow = chunk * widths.parameter / 4  # the chunk's gradient as it is multiplied with
    # Gradients of the head and its input are made in the forward.
    head = local_vocabulary * width * widths.parameter if trains else 0.0
    policy = layout.recompute if layout.recompute in unit.saved else Recompute.NONE
    saved = unit.saved[policy]
    saved_bytes = (
        saved._replace(split=0.0).on(layout.tensor, layout.sequence) + head + tokens * width * widths.parameter
    )
    sums = 2 * head if chunk < 4 * tokens * local_vocabulary else 0.0  # of several chunks, in fp32
    return profile._replace(saved=saved_bytes, forward=chunk + narrow + sums, backward=head, early=head, gradients=head)


_Runs = list[tuple[_Profile, int]]  # like units that follow each other, and their number


def _runs(profiles: Sequence[_Profile], place: range) -> _Runs:
    """Return the units of a stage."""
    # Units of a run are one object, so that they are told by identity.
    stage_profiles = profiles[place.start : place.stop]
    return [(run[0], len(run)) for run in ([*group] for _, group in groupby(stage_profiles, key=id))]


def _elements(chunks: Sequence[_Runs], expert_data: int) -> tuple[UnitElements, ...]:
    """Return the elements of a rank's units and their numbers; all that stays gathered is one unit, the first.

    Units of experts, each inside of a block, are sharded over ``expert_data`` ranks.
    """
    units = [entry for runs in chunks for entry in runs]
    # A tied output layer has a copy where its embedding is elsewhere.
    outside = [unit for unit, _ in units if not unit.block]
    copy = sum(unit.shared for unit in outside) if len(outside) == 1 else 0.0
    rest = [
        UnitElements(unit.parameters - unit.resident, count, unit.single, unit.frozen - unit.stays)
        for unit, count in units
        if unit.parameters > unit.resident or unit.frozen > unit.stays
    ]
    sparse = [entry for entry in units if entry[0].experts or entry[0].expert_frozen]
    rest += [UnitElements(unit.experts, count, False, unit.expert_frozen, 0.0, expert_data) for unit, count in sparse]
    first, stays, replicated = (
        sum(getattr(unit, name) * count for unit, count in units) for name in ("resident", "stays", "replicated")
    )
    return UnitElements(first + copy, 1, False, stays, replicated), *rest


class _Rank:
    """Moments of one pipeline rank."""

    def __init__(
        self,
        chunks: Sequence[_Runs],
        states: RankStates,
        layout: ParallelLayout,
        convention: Convention,
        of_rows: float = 0.0,
    ) -> None:
        self.chunks, self.states, self.layout, self.convention = chunks, states, layout, convention
        self.of_rows = of_rows  # bytes of gradients of tables' rows, which are kept until the update
        self.held = [sum(self.kept(unit) * count for unit, count in runs) for runs in chunks]
        self.late = [sum(unit.late * count for unit, count in runs) for runs in chunks]
        self.parameters = [sum((unit.parameters + unit.experts) * count for unit, count in runs) for runs in chunks]
        self.on_device = {state: size for (state, tier), size in states.resting.items() if tier == "device"}
        blocks = [unit for runs in chunks for unit, _ in runs if unit.block]
        self.largest_output = max((unit.output for unit in blocks), default=0.0)
        self.largest_block = max((unit.parameters + unit.expert for unit in blocks), default=0.0)  # with shapes once
        self.left = 0.0  # elements of gradients that rest where autograd left them, until the update
        if states.buffers is not None and states.buffers.adopts and not states.buffers.sharded:
            self.left = sum(_own(unit) * count for runs in chunks for unit, count in runs if unit.single)

    def kept(self, unit: _Profile) -> float:
        """Bytes of activations on the device that a unit keeps for one micro-batch."""
        return 0.0 if self.layout.activations_on_host and unit.block else unit.saved

    def holds(self, shot: Snapshot) -> float:
        """Bytes that are kept on the device for backwards that are still to come."""
        return sum(count * size for count, size in zip(shot.held, self.held, strict=True)) + sum(
            count * size for count, size in zip(shot.late, self.late, strict=False)
        )

    def memory(self, rank: int, snapshots: Sequence[Snapshot], fixed: float) -> RankMemory:
        """Return the moments of a step, and the states by tier."""
        most: dict[tuple[Kind, int, tuple[bool, ...]], tuple[float, Snapshot]] = {}
        for shot in snapshots:
            saved = self.holds(shot)
            key = shot.kind, shot.chunk, shot.summed
            if key not in most or saved > most[key][0]:
                most[key] = saved, shot
        moments = [moment for _, shot in most.values() for moment in self.moments(shot)]
        update = self.resting(True, 0.0)
        update["gradient"] = update.get("gradient", 0.0) + self.left * self.layout.widths.parameter + self.of_rows
        update["temporary"] = self.states.widened
        moments.append(Moment("update", update))
        states = dict(self.states.resting)
        if slots := self.states.gathered + self.states.working:
            states["slot", "device"] = states.get(("slot", "device"), 0.0) + slots
        if self.layout.activations_on_host:
            sizes = [sum(unit.saved * count for unit, count in runs if unit.block) for runs in self.chunks]
            states["activation", "host"] = max(
                sum(count * size for count, size in zip(shot.held, sizes, strict=True)) for shot in snapshots
            )
        peak = max(moment.total for moment in moments)
        # Each large tensor takes whole segments; half of one is lost on average for each of the blocks' states.
        lost = SEGMENT / 2 * sum(count for runs in self.chunks for unit, count in runs if unit.block)
        return RankMemory(rank, states, tuple(moments), fixed, ceil((peak + lost) / SEGMENT) * SEGMENT)

    def resting(self, summed: bool, done: float) -> dict[str, float]:
        """Bytes on the device outside of computation; ``done`` elements have gradients before sums are whole."""
        sizes, buffers = dict(self.on_device), self.states.buffers
        sizes["slot"] = sizes.get("slot", 0.0) + self.states.gathered
        if buffers is None:
            sizes["slot"] += self.states.working
        elif not buffers.returned:
            sizes["slot"] += sum(buffers.slots) + buffers.sums
        elif not summed:
            # Sums of gradients come into being unit by unit, in the first backward.
            sizes["gradient"] = sizes.get("gradient", 0.0) * done / max(1.0, sum(self.parameters))
        if self.left:
            sizes["gradient"] -= self.left * self.layout.widths.parameter
        sizes["slot"] += self.convention.buffers(self.layout, self.largest_block, self.largest_output, summed)
        return sizes

    def moments(self, snapshot: Snapshot) -> Iterator[Moment]:
        """Yield the moments of an action at which memory can be at its most."""
        runs, forward = self.chunks[snapshot.chunk], snapshot.kind is Kind.FORWARD
        saved = self.holds(snapshot)
        done = sum(size for size, has in zip(self.parameters, snapshot.summed, strict=True) if has)
        rest = "" if forward else f", {max(snapshot.held)} held"
        summed = all(snapshot.summed)
        alone = self.layout.pipeline * self.layout.accumulation == 1
        final = next((place for place, (unit, _) in enumerate(runs) if _own(unit) > 0), None)
        # The gradients of inputs alone free nothing.
        freed = -1.0 if snapshot.kind is Kind.INPUT else 1.0
        full = _FullGradients(self.states.buffers, self.layout, self.left if summed else 0.0, summed)
        for place, (unit, count) in enumerate(runs) if forward else reversed([*enumerate(runs)]):
            if forward:
                saved += self.kept(unit) * count
                parts = self.resting(summed, done)
                again = unit.again if self.layout.recompute.repeats else 0.0
                yield self.moment(parts, full.bytes(), unit, saved, again + unit.forward, f"forward of {unit.name}")
                continue
            # Bytes change evenly once all slots are in use, up to the last of a run.
            first = self.layout.gradient_slots + 2 if self.states.buffers and self.states.buffers.returned else 1
            numbers = [*range(min(first, count)), *([count - 1] if count > first else [])]
            for number, following in zip(numbers, [*numbers[1:], count], strict=True):
                which = "the first " if number == count - 1 > 0 else f"{number} before the last " if number else ""
                name = f"backward of {which}{unit.name}{rest}"
                # Nothing more is gathered before the update: free slots give their memory back.
                last = alone and place == final and number + 1 == count
                for temporary, gradients in self.backward(unit, full, snapshot.kind):
                    parts = self.resting(summed, done)
                    parts["slot"] -= self.states.spare if last else 0.0
                    yield self.moment(parts, gradients, unit, saved, unit.again + temporary, name)
                full.end(unit, following - number)
                saved -= (unit.late if freed < 0 else self.kept(unit)) * (following - number) * freed
                done += (unit.parameters + unit.experts) * (following - number)

    def moment(
        self,
        parts: dict[str, float],
        full: Mapping[str, float],
        unit: _Profile,
        saved: float,
        temporary: float,
        label: str,
    ) -> Moment:
        """Return the bytes while a unit is computed with, beside those that rest and whole gradients."""
        for state, size in full.items():
            parts[state] = parts.get(state, 0.0) + size
        parts |= {"activation": saved, "temporary": temporary}
        if unit.block and self.layout.activations_on_host:
            parts["temporary"] += 2 * unit.saved  # one is computed with, one is on its way
        return Moment(label, parts)

    def backward(self, unit: _Profile, full: _FullGradients, kind: Kind) -> Iterator[tuple[float, dict[str, float]]]:
        """Yield temporary bytes, and those of whole gradients by state, of the moments of a unit's backward."""
        if not self.convention.engine:
            block = max(unit.parameters, unit.experts) if unit.block else 0.0
            yield unit.backward + self.convention.gradients(self.layout, block, unit.largest, unit.output), {}
            return
        if kind is Kind.INPUT:
            yield unit.backward, full.bytes()
            return
        if not (unit.early or unit.gradients):  # by formula: autograd makes the largest one at once
            full.begin(unit)
            yield unit.backward + unit.largest * self.layout.widths.wire, full.bytes()
            return
        yield unit.early, full.bytes()
        # The own gradient of a unit of one parameter is among those that autograd has made.
        before = full.bytes()
        full.begin(unit)
        yield unit.gradients, before if full.adopts(unit) else full.bytes()


def _own(unit: _Profile) -> float:
    """Return the elements of a unit that are not the root's."""
    return unit.parameters - unit.resident


class _FullGradients:
    """Whole gradients on the device while an action of the engine goes on, beyond what rests."""

    def __init__(self, buffers: GradientBuffers | None, layout: ParallelLayout, left: float, summed: bool) -> None:
        self.buffers, self.width = buffers, layout.widths.parameter
        self.opened = 0  # units whose gradients have had a slot
        self.root = False  # the root's is one of them
        self.reduced = False  # some were reduced
        self.left, self.summed = left, summed  # elements where autograd left them; all of those that stay
        self.flying: float = 0.0  # of those, of the unit whose sum is under way

    def adopts(self, unit: _Profile) -> bool:
        """Return whether the unit's gradient stays where autograd made it."""
        return self.buffers is not None and self.buffers.adopts and unit.single

    def begin(self, unit: _Profile) -> None:
        """Note that the first gradient of a unit has been accumulated."""
        units = (_own(unit) > 0 and not self.adopts(unit)) + (unit.experts > 0)
        self.opened += units + (unit.resident > 0 and not self.root)
        self.root |= unit.resident > 0

    def end(self, unit: _Profile, times: int) -> None:
        """Note that the backward of units is over, behind which sharded gradients are reduced."""
        elements = _own(unit) if self.adopts(unit) else 0.0
        if self.buffers is not None and self.buffers.sharded:
            self.left += elements - self.flying
            self.flying = elements
        elif not self.summed:
            self.left += elements * times
        self.reduced |= _own(unit) > 0

    def bytes(self) -> dict[str, float]:
        """Return the bytes by state."""
        buffers = self.buffers
        if buffers is None:
            return {}
        left = self.left * self.width
        if not buffers.sharded:
            return {"gradient": left}
        if not buffers.returned:
            return {"slot": left}
        return {"slot": left + sum(buffers.slots[: self.opened]) + (buffers.sums if self.reduced else 0.0)}
