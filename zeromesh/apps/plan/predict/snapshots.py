"""Micro-batches that a pipeline rank holds when its memory may peak, at few actions, and bytes that are held late."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
from zeromesh.apps.plan.cost.cost import Recompute, UnitCost, WorkKind
from zeromesh.parallel.pipeline.schedule.actions import LAST, Kind
from zeromesh.parallel.pipeline.schedule.generators import ROWS, Shape, generate
from zeromesh.parallel.pipeline.schedule.simulate import Costs


class Snapshot(NamedTuple):
    """One action of a rank, and the micro-batches that its stages hold before it."""

    kind: Kind
    chunk: int
    held: tuple[int, ...]  # by chunk
    summed: tuple[bool, ...]  # by chunk: a micro-batch's backward is behind it
    late: tuple[int, ...] = (0,)  # by chunk, those of ``held`` whose gradients of weights are still to be computed


def late_bytes(unit: UnitCost, layout: ParallelLayout) -> float:
    """Return bytes that a unit keeps while only gradients of its products' weights are still to be computed.

    These are gradients of outputs; and inputs, where blocks are computed again: otherwise those are saved anyway.
    """
    outputs = inputs = 0.0
    for work in unit.forward:
        if work.shape and work.kind is WorkKind.PRODUCT:
            rows, columns, sums = work.shape
            parts = layout.tensor / layout.expert_split if work.groups else 1
            outputs += rows * columns * work.count / (layout.tensor if work.divided == "columns" else parts)
            inputs += rows * sums * work.count / (layout.tensor if work.divided == "sums" else parts)
    width = layout.widths.parameter
    # Products of one input, as those to queries and keys, share it.
    everything = unit.saved[Recompute.NONE].on(layout.tensor, layout.sequence) if Recompute.NONE in unit.saved else 0.0
    return width * outputs + (min(everything, width * inputs) if layout.recompute.repeats else 0.0)


_SIMPLE = ("1f1b", "gpipe")  # schedules whose ranks fill up, and then hold no more
_STEADY = ("interleaved-1f1b", "zb-h1")  # schedules that hold as much in each turn of their middle
_TURNS = 3  # micro-batches for each rank, after which a steady state repeats


@lru_cache(maxsize=4096)
def snapshots_of(
    schedule: str, ranks: int, microbatches: int, chunks: int, costs: Costs | None = None
) -> tuple[tuple[tuple[int, ...], tuple[Snapshot, ...]], ...]:
    """Return each rank's stages, and the actions at which its memory can be at its most."""
    if ranks == 1 or (schedule in _SIMPLE and chunks == 1):
        shape = Shape(ranks, microbatches)
        # Without a pipeline one micro-batch follows the other.
        counts = [ROWS[schedule].held(shape, rank) if ranks > 1 else 1 for rank in range(ranks)]
        return tuple(((rank,), _plain_order(count, microbatches)) for rank, count in enumerate(counts))
    if schedule in _STEADY and microbatches > _TURNS * ranks:
        # What a rank holds repeats from turn to turn, so a long step holds no more than a short one.
        microbatches = _TURNS * ranks + microbatches % ranks
    program = generate(schedule, ranks, microbatches, chunks, costs=costs)
    by_rank = []
    for rank, actions in enumerate(program.ranks):
        stages = tuple(stage for stage, here in enumerate(program.placement) if here == rank)
        by_rank.append((stages, tuple(_distinct(actions, stages))))
    return tuple(by_rank)


def _plain_order(most: int, microbatches: int) -> tuple[Snapshot, ...]:
    """Return the actions of a rank that fills up, and then computes a backward and a forward in turn."""
    shots = [
        Snapshot(Kind.FORWARD, 0, (most - 1,), (False,)),
        Snapshot(Kind.BACKWARD, 0, (most,), (False,)),
    ]
    if microbatches > most:
        shots.append(Snapshot(Kind.FORWARD, 0, (most - 1,), (True,)))
    if microbatches > 1:
        shots.append(Snapshot(Kind.BACKWARD, 0, (most if microbatches > most else most - 1,), (True,)))
    return tuple(shots)


def _distinct(actions: Sequence[tuple[Kind, int, int]], stages: Sequence[int]) -> list[Snapshot]:
    """Return the actions before which no stage could hold more at another action of the same kind."""
    chunks = {stage: chunk for chunk, stage in enumerate(stages)}
    in_flight, late, summed = [0] * len(stages), [0] * len(stages), [False] * len(stages)
    most: dict[tuple[Kind, int, tuple[bool, ...]], dict[tuple[int, ...], int]] = {}
    for turn, (kind, stage, _) in enumerate(actions):
        chunk = chunks[stage]
        if kind in (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT):
            # Few are left at a time, as the counts of a rank's stages rise and fall together.
            here, counts = most.setdefault((kind, chunk, tuple(summed)), {}), (*in_flight, *late)
            if not any(_holds_all(other, counts) for other in here):
                for other in [other for other in here if _holds_all(counts, other)]:
                    del here[other]
                here[counts] = turn
        in_flight[chunk] += (kind is Kind.FORWARD) - (kind in LAST)
        late[chunk] += (kind is Kind.INPUT) - (kind is Kind.WEIGHT)
        summed[chunk] |= kind in LAST
    snapshots = [
        (turn, Snapshot(kind, chunk, counts[: len(stages)], had, counts[len(stages) :]))
        for (kind, chunk, had), here in most.items()
        for counts, turn in here.items()
    ]
    return [snapshot for _, snapshot in sorted(snapshots)]


def _holds_all(first: Sequence[int], second: Sequence[int]) -> bool:
    return all(a >= b for a, b in zip(first, second, strict=True))
