"""Memory of each pipeline rank of a layout: states by tier, and the device's over the moments of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise
from math import ceil
from typing import NamedTuple

from zeromesh.model.placement import Placement
from zeromesh.pipeline.schedule.actions import LAST, Kind
from zeromesh.pipeline.schedule.generators import ROWS, Shape, generate
from zeromesh.pipeline.schedule.partition import uniform
from zeromesh.plan.conventions import ZEROMESH, Convention
from zeromesh.plan.cost import CostSource, Recompute, UnitCost
from zeromesh.plan.layout import ParallelLayout
from zeromesh.plan.machine import Machine
from zeromesh.plan.states import RankStates, states_of

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
    source: CostSource, sequence: int, layout: ParallelLayout, machine: Machine | None = None,
    conventions: Convention = ZEROMESH,
) -> list[RankMemory]:  # fmt: skip
    """Return the memory of every pipeline rank.

    Args:
        source: cost of the model.
        sequence: tokens of a sample.
        layout: sizes of axes and choices.
        machine: devices, whose context is counted; None: it is left out.
        conventions: what is kept of each state; by default as the engine does.

    Raises:
        ValueError: the pipeline has more stages than the model has blocks, or the schedule does not fit the layout.
    """
    units = source.at(layout.micro_batch, sequence, layout.context).units
    stages = _stages(_profiles(units, layout), layout.pipeline * layout.chunks)
    fixed = max((node.device.reserved for node, _ in machine.nodes), default=0.0) if machine else 0.0
    snapshots = _snapshots(layout.schedule, layout.pipeline, layout.accumulation, layout.chunks)
    states: dict[tuple[tuple[float, int], ...], RankStates] = {}  # most ranks of a pipeline have the same
    found = []
    for rank, (own, shots) in enumerate(snapshots):
        chunks = [stages[stage] for stage in own]
        elements = _elements(chunks)
        if elements not in states:
            states[elements] = states_of(elements, layout, conventions)
        found.append(_Rank(chunks, states[elements], layout, conventions).memory(rank, shots, fixed))
    return found


class _Profile(NamedTuple):
    """Amounts of one unit on one rank of the tensor axis."""

    name: str
    block: bool
    parameters: float  # elements
    resident: float  # of them, those that stay gathered
    largest: float  # elements
    shared: float
    saved: float  # bytes, under the layout's policy
    again: float  # bytes that the backward computes again before it begins
    forward: float
    backward: float
    gradients: float  # bytes, as ``backward`` with gradients of parameters that autograd has made; 0: unknown
    output: float


def _profiles(units: Sequence[UnitCost], layout: ParallelLayout) -> list[_Profile]:
    """Return the amounts of all units."""
    # Blocks of one shape share the parts of their costs, so most are worked out once.
    made: dict[tuple[object, ...], _Profile] = {}
    alike: dict[tuple[object, ...], _Profile] = {}  # those of equal amounts are one object, too
    found = []
    for unit in units:
        key = (id(unit.saved), id(unit.parameters), id(unit.forward_peak), id(unit.backward_peak), unit.block)
        profile = made.get(key)
        if profile is None:
            profile = _profile(unit, layout)
            profile = made[key] = alike.setdefault(profile[1:], profile)
        found.append(profile)
    return found


def _profile(unit: UnitCost, layout: ParallelLayout) -> _Profile:
    tensor, sequence = layout.tensor, layout.sequence
    policy = layout.recompute if layout.recompute in unit.saved else Recompute.NONE
    saved = unit.saved[policy].on(tensor, sequence) if policy in unit.saved else 0.0
    again = unit.saved[Recompute.NONE].on(tensor, sequence) - saved if policy is not Recompute.NONE else 0.0
    return _Profile(
        unit.name, unit.block, unit.parameters.on(tensor), unit.resident.on(tensor), unit.largest.on(tensor),
        unit.shared.on(tensor), saved, max(0.0, again), unit.forward_peak.on(tensor, sequence),
        unit.backward_peak.on(tensor, sequence), unit.gradient_peak.on(tensor, sequence),
        unit.output.on(tensor, sequence),
    )  # fmt: skip


_Runs = list[tuple[_Profile, int]]  # like units that follow each other, and their number


def _stages(profiles: Sequence[_Profile], count: int) -> list[_Runs]:
    """Return the units of each stage; those before the first block are in the first one, and so on."""
    blocks = [index for index, profile in enumerate(profiles) if profile.block]
    if len(blocks) < count:
        raise ValueError(
            f"{len(blocks)} blocks cannot be cut into {count} stages, as each needs one; take fewer pipeline ranks or "
            "chunks"
        )
    starts = uniform(len(blocks), count)
    cuts = [0, *(blocks[start] for start in starts[1:]), len(profiles)]
    # Units of a run are one object, so that they are told by identity.
    return [
        [(run[0], len(run)) for run in ([*group] for _, group in groupby(profiles[start:stop], key=id))]
        for start, stop in pairwise(cuts)
    ]


def _elements(chunks: Sequence[_Runs]) -> tuple[tuple[float, int], ...]:
    """Return the elements of a rank's units and their numbers; all that stays gathered is one unit, the first."""
    units = [entry for runs in chunks for entry in runs]
    # A tied output layer has a copy where its embedding is elsewhere.
    outside = [unit for unit, _ in units if not unit.block]
    copy = sum(unit.shared for unit in outside) if len(outside) == 1 else 0.0
    rest = [(unit.parameters - unit.resident, count) for unit, count in units if unit.parameters > unit.resident]
    return (sum(unit.resident * count for unit, count in units) + copy, 1), *rest


class _Snapshot(NamedTuple):
    """One action of a rank, and the micro-batches that its stages hold before it."""

    kind: Kind
    chunk: int
    held: tuple[int, ...]  # by chunk
    summed: tuple[bool, ...]  # by chunk: a micro-batch's backward is behind it


_SIMPLE = ("1f1b", "gpipe")  # schedules whose ranks fill up, and then hold no more
_STEADY = ("interleaved-1f1b", "zb-h1")  # schedules that hold as much in each turn of their middle
_TURNS = 3  # micro-batches for each rank, after which a steady state repeats


@lru_cache(maxsize=4096)
def _snapshots(
    schedule: str, ranks: int, microbatches: int, chunks: int
) -> tuple[tuple[tuple[int, ...], tuple[_Snapshot, ...]], ...]:
    """Return each rank's stages, and the actions at which its memory can be at its most."""
    if ranks == 1 or (schedule in _SIMPLE and chunks == 1):
        shape = Shape(ranks, microbatches)
        # Without a pipeline one micro-batch follows the other.
        held = [ROWS[schedule].held(shape, rank) if ranks > 1 else 1 for rank in range(ranks)]
        return tuple(((rank,), _plain_order(count, microbatches)) for rank, count in enumerate(held))
    if schedule in _STEADY and microbatches > _TURNS * ranks:
        # What a rank holds repeats from turn to turn, so a long step holds no more than a short one.
        microbatches = _TURNS * ranks + microbatches % ranks
    made = generate(schedule, ranks, microbatches, chunks)
    found = []
    for rank, actions in enumerate(made.ranks):
        own = tuple(stage for stage, here in enumerate(made.placement) if here == rank)
        found.append((own, tuple(_distinct(actions, own))))
    return tuple(found)


def _plain_order(most: int, microbatches: int) -> tuple[_Snapshot, ...]:
    """Return the actions of a rank that fills up, and then computes a backward and a forward in turn."""
    shots = [
        _Snapshot(Kind.FORWARD, 0, (most - 1,), (False,)), _Snapshot(Kind.BACKWARD, 0, (most,), (False,)),
    ]  # fmt: skip
    if microbatches > most:
        shots.append(_Snapshot(Kind.FORWARD, 0, (most - 1,), (True,)))
    if microbatches > 1:
        shots.append(_Snapshot(Kind.BACKWARD, 0, (most if microbatches > most else most - 1,), (True,)))
    return tuple(shots)


def _distinct(actions: Sequence[tuple[Kind, int, int]], own: Sequence[int]) -> list[_Snapshot]:
    """Return the actions before which no stage could hold more at another action of the same kind."""
    chunks = {stage: chunk for chunk, stage in enumerate(own)}
    held, summed = [0] * len(own), [False] * len(own)
    most: dict[tuple[Kind, int, tuple[bool, ...]], dict[tuple[int, ...], int]] = {}
    for turn, (kind, stage, _) in enumerate(actions):
        chunk = chunks[stage]
        if kind in (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT):
            # Few are left at a time, as the counts of a rank's stages rise and fall together.
            here, counts = most.setdefault((kind, chunk, tuple(summed)), {}), tuple(held)
            if not any(_holds_all(other, counts) for other in here):
                for other in [other for other in here if _holds_all(counts, other)]:
                    del here[other]
                here[counts] = turn
        held[chunk] += (kind is Kind.FORWARD) - (kind in LAST)
        summed[chunk] |= kind in LAST
    found = [
        (turn, _Snapshot(kind, chunk, counts, had))
        for (kind, chunk, had), here in most.items()
        for counts, turn in here.items()
    ]
    return [snapshot for _, snapshot in sorted(found)]


def _holds_all(first: Sequence[int], second: Sequence[int]) -> bool:
    return all(a >= b for a, b in zip(first, second, strict=True))


class _Rank:
    """Moments of one pipeline rank."""

    def __init__(
        self, chunks: Sequence[_Runs], states: RankStates, layout: ParallelLayout, convention: Convention
    ) -> None:  # fmt: skip
        self.chunks, self.states, self.layout, self.convention = chunks, states, layout, convention
        self.held = [sum(self.kept(unit) * count for unit, count in runs) for runs in chunks]
        self.parameters = [sum(unit.parameters * count for unit, count in runs) for runs in chunks]
        self.on_device = {state: size for (state, tier), size in states.resting.items() if tier == "device"}
        blocks = [unit for runs in chunks for unit, _ in runs if unit.block]
        self.messages = 0.0  # bytes of buffers for what each micro-batch receives from both neighbours
        if convention.whole_in_pipeline and layout.pipeline > 1:
            self.messages = 2 * layout.accumulation * max(unit.output for unit in blocks)
        self.largest_block = max((unit.parameters for unit in blocks), default=0.0)

    def kept(self, unit: _Profile) -> float:
        """Bytes of activations on the device that a unit keeps for one micro-batch."""
        return 0.0 if self.layout.activations_on_host and unit.block else unit.saved

    def memory(self, rank: int, snapshots: Sequence[_Snapshot], fixed: float) -> RankMemory:
        """Return the moments of a step, and the states by tier."""
        most: dict[tuple[Kind, int, tuple[bool, ...]], tuple[float, _Snapshot]] = {}
        for shot in snapshots:
            kept = sum(count * size for count, size in zip(shot.held, self.held, strict=True))
            key = shot.kind, shot.chunk, shot.summed
            if key not in most or kept > most[key][0]:
                most[key] = kept, shot
        moments = [moment for _, shot in most.values() for moment in self.moments(shot)]
        moments.append(Moment("update", self.resting(True, 0.0)))
        states = dict(self.states.resting)
        if slots := self.states.gathered + self.states.working:
            states["slot", "device"] = states.get(("slot", "device"), 0.0) + slots
        if self.layout.activations_on_host:
            held = [sum(unit.saved * count for unit, count in runs if unit.block) for runs in self.chunks]
            states["activation", "host"] = max(
                sum(count * size for count, size in zip(shot.held, held, strict=True)) for shot in snapshots
            )
        peak = max(moment.total for moment in moments)
        # Each large tensor takes whole segments; half of one is lost on average for each of the blocks' states.
        lost = SEGMENT / 2 * sum(count for runs in self.chunks for unit, count in runs if unit.block)
        return RankMemory(rank, states, tuple(moments), fixed, ceil((peak + lost) / SEGMENT) * SEGMENT)

    def resting(self, summed: bool, done: float) -> dict[str, float]:
        """Bytes on the device outside of computation; ``done`` elements have gradients before sums are whole."""
        found = dict(self.on_device)
        found["slot"] = found.get("slot", 0.0) + self.states.gathered + self.convention.workspace + self.messages
        if not self.states.returned:
            found["slot"] += self.states.working
        elif not summed:
            # Sums of gradients come into being unit by unit, in the first backward.
            found["gradient"] = found.get("gradient", 0.0) * done / max(1.0, sum(self.parameters))
        if self.convention.placeholders and summed:
            found["slot"] += self.largest_block * self.convention.widths.parameter
        return found

    def moments(self, snapshot: _Snapshot) -> Iterator[Moment]:
        """Yield the moments of an action at which memory can be at its most."""
        runs, forward = self.chunks[snapshot.chunk], snapshot.kind is Kind.FORWARD
        kept = sum(count * size for count, size in zip(snapshot.held, self.held, strict=True))
        done = sum(size for size, has in zip(self.parameters, snapshot.summed, strict=True) if has)
        word, rest = ("forward", "") if forward else ("backward", f", {max(snapshot.held)} held")
        begun = 0  # units with parameters whose backward has begun
        for unit, count in runs if forward else reversed(runs):
            name = f"{word} of {unit.name}{rest}"
            if forward:
                kept += self.kept(unit) * count
                yield self.moment(snapshot, unit, kept, (done, 0), name)
                continue
            # Bytes change evenly between the first and the last of a run.
            has = unit.parameters > 0
            yield self.moment(snapshot, unit, kept, (done, begun + has), name)
            kept -= self.kept(unit) * count
            done += unit.parameters * count
            begun += count * has
            if count > 1:
                last = done - unit.parameters, begun
                yield self.moment(
                    snapshot, unit, kept + self.kept(unit), last, f"{word} of the first {unit.name}{rest}"
                )

    def moment(
        self, snapshot: _Snapshot, unit: _Profile, kept: float, progress: tuple[float, int], label: str
    ) -> Moment:  # fmt: skip
        """Return the bytes while a unit is computed with.

        Args:
            snapshot: the action.
            unit: what is computed with.
            kept: bytes of activations that are held.
            progress: elements of units whose backward is over, and number of those whose backward has begun.
            label: of the moment.
        """
        forward = snapshot.kind is Kind.FORWARD
        done, begun = progress
        parts = self.resting(all(snapshot.summed), done)
        # What a block computes again is there until its forward ends, and again in its backward.
        again = unit.again if not forward or self.layout.recompute is Recompute.BLOCKS else 0.0
        parts["activation"] = kept
        parts["temporary"] = again + (unit.forward if forward else unit.backward + self.gradients(unit))
        if self.states.returned:
            # Slots get memory as they are used, and lose it when the micro-batch's gradients are summed.
            parts["slot"] += self.states.working * min(1.0, begun / self.layout.gradient_slots)
        if unit.block and self.layout.activations_on_host:
            parts["temporary"] += 2 * unit.saved  # one is computed with, one is on its way
        return Moment(label, parts)

    def gradients(self, unit: _Profile) -> float:
        """Bytes of whole gradients while a unit's backward runs, beside sums and slots."""
        convention = self.convention
        if convention.engine:
            made = unit.gradients - unit.backward
            return max(0.0, made) if unit.gradients else unit.largest * self.layout.widths.wire
        if not unit.block:
            return unit.largest * convention.head_gradient if unit.output <= 4 else 0.0
        if self.layout.row.gradient is Placement.REPLICATED:
            return 0.0
        return unit.parameters * convention.unit_gradient * convention.unit_gradients
