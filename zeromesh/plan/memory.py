"""Memory of each pipeline rank of a layout: states by tier, and the device's over the moments of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from zeromesh.model.placement import Placement
from zeromesh.pipeline.schedule.actions import LAST, Kind
from zeromesh.pipeline.schedule.generators import ROWS, generate
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
    profiles = [_profile(unit, layout) for unit in units]
    stages = _stages(profiles, layout.pipeline * layout.chunks)
    fixed = max((node.device.reserved for node, _ in machine.nodes), default=0.0) if machine else 0.0
    snapshots = _snapshots(layout.schedule, layout.pipeline, layout.accumulation, layout.chunks)
    found = []
    for rank, (own, shots) in enumerate(snapshots):
        found.append(_Rank([stages[stage] for stage in own], layout, conventions).memory(rank, shots, fixed))
    return found


class _Profile(NamedTuple):
    """Amounts of one unit on one rank of the tensor axis."""

    name: str
    block: bool
    parameters: float  # elements
    trained: float
    largest: float  # elements
    shared: float
    saved: float  # bytes, under the layout's policy
    again: float  # bytes that the backward computes again before it begins
    forward: float
    backward: float
    output: float


def _profile(unit: UnitCost, layout: ParallelLayout) -> _Profile:
    tensor, sequence = layout.tensor, layout.sequence
    policy = layout.recompute if layout.recompute in unit.saved else Recompute.NONE
    saved = unit.saved[policy].on(tensor, sequence) if policy in unit.saved else 0.0
    again = unit.saved[Recompute.NONE].on(tensor, sequence) - saved if policy is not Recompute.NONE else 0.0
    return _Profile(
        unit.name, unit.block, unit.parameters.on(tensor), unit.trained, unit.largest.on(tensor),
        unit.shared.on(tensor), saved, max(0.0, again), unit.forward_peak.on(tensor, sequence),
        unit.backward_peak.on(tensor, sequence), unit.output.on(tensor, sequence),
    )  # fmt: skip


def _stages(profiles: Sequence[_Profile], count: int) -> list[list[_Profile]]:
    """Return the units of each stage; those before the first block are in the first one, and so on."""
    blocks = [index for index, profile in enumerate(profiles) if profile.block]
    if len(blocks) < count:
        raise ValueError(
            f"{len(blocks)} blocks cannot be cut into {count} stages, as each needs one; take fewer pipeline ranks or "
            "chunks"
        )
    starts = uniform(len(blocks), count)
    cuts = [0, *(blocks[start] for start in starts[1:]), len(profiles)]
    return [list(profiles[start:stop]) for start, stop in zip(cuts, cuts[1:], strict=False)]


class _Snapshot(NamedTuple):
    """One action of a rank, and the micro-batches that its stages hold before it."""

    kind: Kind
    chunk: int
    held: tuple[int, ...]  # by chunk
    summed: tuple[bool, ...]  # by chunk: a micro-batch's backward is behind it


_FEW = 4  # turns of a pipeline, after which its steady state repeats


@lru_cache(maxsize=4096)
def _snapshots(
    schedule: str, ranks: int, microbatches: int, chunks: int
) -> tuple[tuple[tuple[int, ...], tuple[_Snapshot, ...]], ...]:
    """Return each rank's stages, and the actions at which its memory can be at its most."""
    if ranks == 1:
        # Without a pipeline one micro-batch follows the other.
        shots = [_Snapshot(Kind.FORWARD, 0, (0,), (False,)), _Snapshot(Kind.BACKWARD, 0, (1,), (False,))]
        if microbatches > 1:
            shots += [_Snapshot(Kind.FORWARD, 0, (0,), (True,)), _Snapshot(Kind.BACKWARD, 0, (1,), (True,))]
        return (((0,), tuple(shots)),)
    if ROWS[schedule].held is ROWS["1f1b"].held or schedule in ("interleaved-1f1b", "zb-h1"):
        # What a rank holds repeats from turn to turn, so a long step holds no more than a short one.
        turns = _FEW * ranks
        microbatches = microbatches if microbatches <= turns else turns + microbatches % ranks
    made = generate(schedule, ranks, microbatches, chunks)
    found = []
    for rank, actions in enumerate(made.ranks):
        own = tuple(stage for stage, here in enumerate(made.placement) if here == rank)
        found.append((own, tuple(_distinct(actions, own))))
    return tuple(found)


def _distinct(actions: Sequence[tuple[Kind, int, int]], own: Sequence[int]) -> Iterator[_Snapshot]:
    """Yield the actions before which a stage holds more than at any earlier one of its kind."""
    held, summed = [0] * len(own), [False] * len(own)
    most: dict[tuple[Kind, int, bool], list[tuple[int, ...]]] = {}
    for kind, stage, _ in actions:
        chunk = own.index(stage)
        counts = tuple(held)
        if kind in (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT):
            seen = most.setdefault((kind, chunk, all(summed)), [])
            if not any(all(a <= b for a, b in zip(counts, other, strict=True)) for other in seen):
                seen.append(counts)
                yield _Snapshot(kind, chunk, counts, tuple(summed))
        held[chunk] += (kind is Kind.FORWARD) - (kind in LAST)
        summed[chunk] |= kind in LAST


class _Rank:
    """Moments of one pipeline rank."""

    def __init__(self, chunks: list[list[_Profile]], layout: ParallelLayout, convention: Convention) -> None:
        self.chunks, self.layout, self.convention = chunks, layout, convention
        units = [unit for chunk in chunks for unit in chunk]
        # Units outside of blocks travel together. A tied output layer has a copy where its embedding is elsewhere.
        outside = [unit for unit in units if not unit.block]
        copy = sum(unit.shared for unit in outside if sum(one.shared for one in outside) and len(outside) == 1)
        self.blocks = [unit for unit in units if unit.block]
        elements = [sum(unit.parameters for unit in outside) + copy, *(unit.parameters for unit in self.blocks)]
        self.states: RankStates = states_of(elements, layout, convention)
        self.held = [sum(self.kept(unit) for unit in chunk) for chunk in chunks]

    def kept(self, unit: _Profile) -> float:
        """Bytes of activations on the device that a unit keeps for one micro-batch."""
        return 0.0 if self.layout.activations_on_host and unit.block else unit.saved

    def memory(self, rank: int, snapshots: Sequence[_Snapshot], fixed: float) -> RankMemory:
        """Return the moments of a step, and the states by tier."""
        moments = [moment for snapshot in snapshots for moment in self.moments(snapshot)]
        moments.append(Moment("update", self.resting(True)))
        states = dict(self.states.resting)
        for size in (self.states.gathered, self.states.working):
            if size:
                states["slot", "device"] = states.get(("slot", "device"), 0.0) + size
        if self.layout.activations_on_host:
            most = max((sum(shot.held) for shot in snapshots), default=0)
            states["activation", "host"] = most * sum(unit.saved for unit in self.blocks) / max(1, len(self.chunks))
        peak = max(moment.total for moment in moments)
        # Each large tensor takes whole segments; half of one is lost on average for each of the blocks' states.
        lost = SEGMENT / 2 * len(self.blocks)
        return RankMemory(rank, states, tuple(moments), fixed, ceil((peak + lost) / SEGMENT) * SEGMENT)

    def resting(self, summed: bool, done: Sequence[_Profile] = ()) -> dict[str, float]:
        """Bytes on the device outside of computation; ``done`` have gradients where sums are not whole yet."""
        found = {state: size for (state, tier), size in self.states.resting.items() if tier == "device"}
        if self.states.shards and not summed:
            # Sums of gradients come into being unit by unit, in the first backward.
            share = sum(unit.parameters for unit in done) / max(1.0, sum(u.parameters for c in self.chunks for u in c))
            found["gradient"] = found.get("gradient", 0.0) * share
        found["slot"] = self.states.gathered + (0.0 if self.states.shards else self.states.working)
        found["slot"] += self.convention.workspace
        if self.convention.placeholders and self.blocks and summed:
            found["slot"] += max(unit.parameters for unit in self.blocks) * self.convention.widths.parameter
        return found

    def moments(self, snapshot: _Snapshot) -> Iterator[Moment]:
        """Yield the moments of an action at which memory can be at its most."""
        units = self.chunks[snapshot.chunk]
        others = sum(count * size for count, size in zip(snapshot.held, self.held, strict=True))
        summed = all(snapshot.summed)
        done = [unit for chunk, has in zip(self.chunks, snapshot.summed, strict=True) if has for unit in chunk]
        forward = snapshot.kind is Kind.FORWARD
        kept, number = others, max(snapshot.held)
        for index, unit in enumerate(units if forward else reversed(units)):
            position = index if forward else len(units) - 1 - index
            if forward:
                kept += self.kept(unit)
            if _is_end(units, position):
                parts = self.resting(summed, [*done, *units[position + 1 :]] if not forward else done)
                parts["activation"] = kept + (0.0 if forward else unit.again)
                parts["temporary"] = unit.forward if forward else unit.backward + self.gradients(unit)
                if not forward and self.states.shards:
                    parts["slot"] += self.states.working
                if unit.block and self.layout.activations_on_host:
                    parts["temporary"] += 2 * unit.saved  # one is computed with, one is on its way
                elif forward and unit.block and self.layout.recompute is Recompute.BLOCKS:
                    parts["activation"] += unit.again  # until the block's forward ends
                yield Moment(f"{'forward' if forward else 'backward'} of {unit.name}, {number} held", parts)
            if not forward:
                kept -= self.kept(unit)

    def gradients(self, unit: _Profile) -> float:
        """Bytes of whole gradients while a unit's backward runs, beside sums and slots."""
        convention, row = self.convention, self.layout.row
        if convention.engine:
            return unit.largest * self.layout.widths.wire
        if unit.block:
            whole = row.gradient is Placement.SHARDED
            return unit.parameters * convention.unit_gradient * convention.unit_gradients if whole else 0.0
        return unit.largest * convention.head_gradient if unit.output <= 4 else 0.0


def _is_end(units: Sequence[_Profile], index: int) -> bool:
    """Return whether a unit is the first or the last of a run of like ones, between which bytes change evenly."""
    if index in (0, len(units) - 1):
        return True
    before, unit, after = units[index - 1 : index + 2]
    return before[1:] != unit[1:] or unit[1:] != after[1:]
