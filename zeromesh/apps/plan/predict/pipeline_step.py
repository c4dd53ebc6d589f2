"""Simulation of a pipeline's step: stages with costs of their own, under a named schedule, with few micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from zeromesh.apps.plan.cost.cost import UnitCost
from zeromesh.base.clock import simulate
from zeromesh.parallel.pipeline.schedule.actions import Kind
from zeromesh.parallel.pipeline.schedule.generators import generate, shape_of
from zeromesh.parallel.pipeline.schedule.partition import partition, uniform
from zeromesh.parallel.pipeline.schedule.simulate import GRADIENT, OUTPUT, RELEASE, Costs, Program

GROUPS = 32  # micro-batches that are simulated, about, on few ranks; three groups on many


def stage_units(units: Sequence[UnitCost], stages: int, even: bool = False) -> list[range]:
    """Return the places of each stage's units, which begin with a block but for the first stage's.

    Args:
        units: of the model.
        stages: of all ranks.
        even: as many blocks each; otherwise the dearest stage has as few operations as can be, as the engine cuts.

    Raises:
        ValueError: there are fewer blocks than stages.
    """
    if stages == 1:  # also of models without blocks, such as recommenders
        return [range(len(units))]
    blocks = [place for place, unit in enumerate(units) if unit.block]
    if len(blocks) < stages:
        raise ValueError(
            f"{len(blocks)} blocks cannot be cut into {stages} stages, as each needs one; take fewer pipeline ranks or "
            "chunks"
        )
    operations = [sum(work.flops.on() * work.count for work in unit.forward) for unit in units]
    edges = [0, *blocks[1:], len(units)]
    costs = [sum(operations[start:stop]) for start, stop in pairwise(edges)]
    most = max(costs)
    if even or not most:
        starts = uniform(len(blocks), stages)
    else:
        starts = _cheapest(tuple(round(cost / most, 9) for cost in costs), stages)
    return [range(start, stop) for start, stop in pairwise([0, *(blocks[first] for first in starts[1:]), len(units)])]


_cheapest = lru_cache(maxsize=1024)(partition)


class StageCost(NamedTuple):
    """Seconds of one stage's actions for a micro-batch."""

    forward: float
    input: float
    weight: float
    release: float = 0.0  # before it the first forward cannot begin
    message: float = 0.0  # of its output, and of the gradient of its output


class Run(NamedTuple):
    """Times of a simulated pipeline."""

    ends: tuple[float, ...]  # by stage: of its last backward
    busy: tuple[float, ...]  # by rank: seconds of computation
    placement: tuple[int, ...]  # rank of each stage
    actions: tuple[tuple[int, str, float, float], ...] = ()  # rank, label, start, end

    @property
    def makespan(self) -> float:
        """Time at which the last backward ends."""
        return max(self.ends)


def placement_of(
    name: str, ranks: int, microbatches: int, chunks: int, keep: bool = False, costs: Costs | None = None
) -> tuple[int, ...]:
    """Return the rank of each stage, as ``pipelined`` simulates them. Raise ValueError as it does."""
    return _program(name, ranks, _simulated(ranks, microbatches, keep), chunks, costs)[1]


def _simulated(ranks: int, microbatches: int, keep: bool) -> int:
    """Return how many micro-batches are simulated: all, or the longer one of two steps in a steady state."""
    # Uneven stages take some groups to settle: their slowest one then sets the pace of all.
    few = microbatches % ranks + max(3, GROUPS // ranks) * ranks
    return microbatches if keep or microbatches <= few + ranks else few


def pipelined(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int,
    stages: Sequence[StageCost],
    keep: bool = False,
    costs: Costs | None = None,
) -> Run:
    """Simulate a schedule, whose actions are in the order that is good for ``costs``; None: for equal ones.

    In a steady state each group of as many micro-batches as ranks takes the same time, so that of many micro-batches
    only some are simulated; with ``keep`` all of them are, and the actions are returned.

    Raises:
        ValueError: the schedule is not for that number of ranks, micro-batches or chunks.
    """
    shape_of(name, ranks, microbatches, chunks)
    few = _simulated(ranks, microbatches, keep)

    def run(count: int) -> Run:
        return _run(*_program(name, ranks, count, chunks, costs), stages, keep)

    if few == microbatches:
        return run(microbatches)
    # Two lengths of the steady state, of which the longer one has one group more.
    short, long = run(few - ranks), run(few)
    groups = (microbatches - few) // ranks
    ends = tuple(b + groups * (b - a) for a, b in zip(short.ends, long.ends, strict=True))
    busy = tuple(b + groups * (b - a) for a, b in zip(short.busy, long.busy, strict=True))
    return Run(ends, busy, long.placement)


@lru_cache(maxsize=16)
def _program(
    name: str, ranks: int, microbatches: int, chunks: int, costs: Costs | None
) -> tuple[Program, tuple[int, ...]]:
    """Return the program of a schedule, and the rank of each stage."""
    schedule = generate(name, ranks, microbatches, chunks, costs=costs)
    return Program.of(schedule), schedule.placement


def _run(program: Program, placement: tuple[int, ...], stages: Sequence[StageCost], keep: bool) -> Run:
    """Return the times of a step of stages with these costs."""
    times: dict[tuple[str, int], float] = {}
    sent = 0.0
    for stage, cost in enumerate(stages):
        both = cost.input + cost.weight
        times |= {(Kind.FORWARD, stage): cost.forward, (Kind.INPUT, stage): cost.input, (Kind.BACKWARD, stage): both}
        # A message between two stages is the earlier one's output, or the gradient of it.
        times |= {(Kind.WEIGHT, stage): cost.weight, (OUTPUT, stage): sent, (GRADIENT, stage): cost.message}
        times[RELEASE, stage] = cost.release
        sent = cost.message
    seconds = [times[key] for key in program.costs]
    starts, ends = simulate(program.uses, seconds)
    last, busy = [0.0] * len(stages), [0.0] * (max(placement) + 1)
    for position, rank, action in program.done:
        last[action.stage] = ends[position]
        busy[rank] += seconds[position]
    computations = program.done if keep else ()
    actions = tuple((rank, program.uses[here].label, starts[here], ends[here]) for here, rank, _ in computations)
    return Run(tuple(last), tuple(busy), placement, actions)
