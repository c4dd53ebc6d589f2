"""Named schedules, as rows of a table, and the search for a schedule that suits given costs.

GPipe (Huang et al., 2019); 1F1B (Narayanan et al., "PipeDream-Flush", 2021a); interleaved 1F1B (Narayanan et al.,
"Efficient Large-Scale Language Model Training", 2021b); breadth-first (Lamy-Poirier, 2022); ZB-H1 and ZB-V (Qi et al.,
"Zero Bubble Pipeline Parallelism", 2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import count, product, zip_longest

from zeromesh.parallel.pipeline.schedule.actions import Action, Kind, Schedule, ScheduleError, loop, vee
from zeromesh.parallel.pipeline.schedule.execution import most_held_by_rank
from zeromesh.parallel.pipeline.schedule.listing import ListRule, ListScheduler
from zeromesh.parallel.pipeline.schedule.simulate import Costs, simulate

# Two mechanisms make all schedules. In a fixed order, each rank does some forwards to warm up, then a forward and a
# backward in turn, then the backwards that are left; rows differ in the order of chunks and in the length of the
# warm-up. The list scheduler decides by what can begin. With the fixed order of zb-h1 or zb-v it only places weight
# gradients; without a fixed order, as for the search, it decides everything.

SEARCH = "search"
PATIENCE = (0.0, 0.5, 1.0)  # candidates of the search, in parts of an action's time


@dataclass(frozen=True)
class Shape:
    """Size of a pipeline and of a step: ``chunks`` are stages per rank, ``group`` is of interleaved-1f1b."""

    ranks: int
    microbatches: int
    chunks: int = 1
    group: int = 0


# Order of one rank: chunks of its forwards (None: a turn without one), chunks of its backwards, and the number of
# forwards before the first backward. Each chunk takes its micro-batches in ascending order.
Order = tuple[list[int | None], list[int], int]


@dataclass(frozen=True)
class ScheduleRow:
    """Named schedule."""

    text: str  # description, in a line
    chunks: tuple[int, float]  # the least and the most stages per rank; the least is the default
    placement: Callable[[int, int], tuple[int, ...]]  # from ranks and chunks to the rank of each stage
    split: bool  # true if input and weight gradients are actions of their own
    order: Callable[[Shape, int], Order]  # from a rank to its order
    full: Callable[[Shape], int]  # least number of micro-batches that fill the pipeline
    # Idle time in parts of busy time, if the pipeline is full, a forward and either gradient take the same time, and
    # messages none.
    bubble: Callable[[Shape], Fraction]
    formula: str  # the same for the reader
    held: Callable[[Shape, int], int]  # the most micro-batches that all stages of a rank together hold


def _in_groups(shape: Shape, warm_up: int, group: int) -> Order:
    """Return all micro-batches of a group through the first chunk, then the next one; backwards from the last one."""
    forwards: list[int | None] = []
    backwards: list[int] = []
    for first in range(0, shape.microbatches, group):
        count = min(group, shape.microbatches - first)
        for chunk in range(shape.chunks):
            forwards += [chunk] * count
            backwards += [shape.chunks - 1 - chunk] * count
    return forwards, backwards, warm_up


def _forwards_first(shape: Shape, rank: int) -> Order:
    return _in_groups(shape, shape.microbatches * shape.chunks, shape.microbatches)


def _one_forward_one_backward(shape: Shape, rank: int) -> Order:
    # A rank warms up until the first micro-batch is at the last rank ("PipeDream-Flush", 2021a).
    return _in_groups(shape, shape.ranks - rank - 1, shape.microbatches)


def _interleaved_warm_up(shape: Shape, rank: int) -> int:
    # All chunks but the last take a group each, and the way to the last rank and back takes two turns a rank (2021b).
    return 2 * (shape.ranks - rank - 1) + (shape.chunks - 1) * shape.group


def _vee_order(shape: Shape, rank: int) -> Order:
    """Return forwards of the first chunk until the second one can begin, then chunks in turn."""
    # For few micro-batches the order has micro-batches that do not exist; _fixed_order leaves them out.
    ranks, number = shape.ranks, shape.microbatches
    after, least = ranks - rank, number - 2 * ranks + rank
    steady = [chunk for turn in range(number - ranks) for chunk in (0 if turn <= least else None, 1)]
    forwards = [0] * (2 * after - 1) + [1, 0] * rank + [1] * after + steady
    backwards = [1] * after + [0, 1] * (number - after) + [0] * after
    return forwards, backwards, 2 * ranks - 1


ROWS: dict[str, ScheduleRow] = {
    "gpipe": ScheduleRow(
        "all forwards, then all backwards", (1, 1), loop, False, _forwards_first, lambda s: 1,
        lambda s: Fraction(s.ranks - 1, s.microbatches), "(p-1)/m",
        lambda s, rank: s.microbatches,
    ),
    "1f1b": ScheduleRow(
        "each backward as early as it can be", (1, 1), loop, False, _one_forward_one_backward, lambda s: 1,
        lambda s: Fraction(s.ranks - 1, s.microbatches), "(p-1)/m",
        lambda s, rank: min(s.microbatches, s.ranks - rank),
    ),
    "interleaved-1f1b": ScheduleRow(
        "1f1b over several stages per rank", (2, math.inf), loop, False,
        lambda s, rank: _in_groups(s, _interleaved_warm_up(s, rank), s.group), lambda s: 1,
        lambda s: Fraction(s.ranks - 1, s.chunks * s.microbatches), "(p-1)/(v m)",
        lambda s, rank: min(s.chunks * s.microbatches, _interleaved_warm_up(s, rank) + 1),
    ),
    "breadth-first": ScheduleRow(
        "all micro-batches through a stage, then through the rank's next one", (2, math.inf), loop, False,
        _forwards_first, lambda s: s.ranks,
        lambda s: Fraction(s.ranks - 1, s.chunks * s.microbatches), "(p-1)/(v m)",
        lambda s, rank: s.chunks * s.microbatches,
    ),
    "zb-h1": ScheduleRow(
        "1f1b, with weight gradients in time that was idle", (1, 1), loop, True,
        _one_forward_one_backward, lambda s: s.ranks,
        lambda s: Fraction(s.ranks - 1, 3 * s.microbatches), "(p-1)/(3 m)",
        lambda s, rank: min(s.microbatches, s.ranks),
    ),
    "zb-v": ScheduleRow(
        "the first and the last stage on rank 0, and weight gradients in all idle time", (2, 2), vee, True,
        _vee_order, lambda s: 2 * s.ranks - 1,
        lambda s: Fraction(0), "0",
        lambda s, rank: min(2 * s.microbatches, 2 * s.ranks),
    ),
}  # fmt: skip
"""In formulas p is the number of ranks, m of micro-batches, v of chunks, which are stages per rank."""

NAMES = (*ROWS, SEARCH)


def shape_of(name: str, ranks: int, microbatches: int, chunks: int | None = None, group: int | None = None) -> Shape:
    """Return the checked arguments of ``generate``; raise ValueError as it does."""
    if name not in NAMES:
        raise ValueError(f"there is no schedule {name!r}; take one of {', '.join(NAMES)}")
    least, most = (1, math.inf) if name == SEARCH else ROWS[name].chunks
    chunks = least if chunks is None else chunks
    for what, value in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if value < 1:
            raise ValueError(f"{what} is {value}; it must be at least 1")
    if not least <= chunks <= most:
        rule = f"exactly {least}" if least == most else f"at least {least}"
        raise ValueError(f"{name} with {chunks} stages per rank: it has {rule}; take that, or another schedule")
    if group is not None and name != "interleaved-1f1b":
        raise ValueError(f"group is {group}, but {name} has no groups; leave it out, or take interleaved-1f1b")
    group = ranks if group is None else group
    # A rank comes to its next chunk after a group's forwards, and the input of that takes as many turns as there are
    # ranks.
    if group < ranks:
        raise ValueError(f"group is {group}; it must be at least the number of ranks, {ranks}")
    if name == "interleaved-1f1b" and not _fills_groups(microbatches, group, ranks):
        down = next((m for m in range(microbatches, 0, -1) if _fills_groups(m, group, ranks)), None)
        up = next(m for m in range(microbatches, microbatches + group + 1) if _fills_groups(m, group, ranks))
        raise ValueError(
            f"{name} with {microbatches} micro-batches in groups of {group} on {ranks} ranks: the last group must have "
            f"at least {ranks}; take {f'{down} or ' if down else ''}{up} micro-batches, or zb-v, which takes any number"
        )
    return Shape(ranks, microbatches, chunks, group)


def _fills_groups(microbatches: int, group: int, ranks: int) -> bool:
    # The last group is the rest, for which the same holds as for all others: it is no smaller than the ranks.
    rest = microbatches % group
    return rest >= ranks or (rest == 0 and microbatches > 0)


def generate(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    group: int | None = None,
    costs: Costs | None = None,
    memory: float | None = None,
) -> Schedule:
    """Make a schedule: what is computed, in which order. Passes in ``lowering.py`` add the rest.

    Args:
        name: one of ``NAMES``.
        ranks: of the pipeline.
        microbatches: their number.
        chunks: stages per rank; None: as few as the row has.
        group: for interleaved-1f1b, micro-batches of one chunk before the next chunk; None: as many as ranks.
        costs: of actions, for the rows that place weight gradients, and for the search; None: equal.
        memory: for the search, the limit of a rank's activations.

    Raises:
        ValueError: the row is not for that; with what it is for.
    """
    shape, costs = shape_of(name, ranks, microbatches, chunks, group), costs or Costs()
    if costs.stages not in (None, shape.ranks * shape.chunks):
        count = shape.ranks * shape.chunks
        rule = "measure as many stages, or give one number for all"
        raise ValueError(f"the costs are those of {costs.stages} stages, and {name} has {count}; {rule}")
    if name == SEARCH:
        return search(shape, costs, memory)
    row = ROWS[name]
    # A row's own order, with both gradients at once, bounds the memory of the split one.
    fixed = _fixed_order(row, shape)
    if not row.split:
        return fixed
    # No rank holds more than the rank that holds most in the order itself.
    limit = max(most_held_by_rank(fixed, costs.activations(fixed.stages)))
    return ListScheduler(shape.microbatches, fixed.placement, ListRule(sequence=fixed.ranks), limit, costs).run()


def _fixed_order(row: ScheduleRow, shape: Shape) -> Schedule:
    placement = row.placement(shape.ranks, shape.chunks)
    orders = []
    for rank in range(shape.ranks):
        stages = [stage for stage, here in enumerate(placement) if here == rank]
        forwards, backwards, warm_up = row.order(shape, rank)
        first = _numbered(Kind.FORWARD, forwards, stages)
        second = _numbered(Kind.BACKWARD, list(backwards), stages)
        turns = [action for pair in zip_longest(first[warm_up:], second) for action in pair]
        wanted = range(shape.microbatches)
        orders.append(tuple(action for action in first[:warm_up] + turns if action and action.microbatch in wanted))
    return Schedule(shape.microbatches, placement, tuple(orders))


def _numbered(kind: Kind, chunks: list[int | None], stages: list[int]) -> list[Action | None]:
    counts = [count() for _ in stages]
    return [None if chunk is None else Action(kind, stages[chunk], next(counts[chunk])) for chunk in chunks]


def search(shape: Shape, costs: Costs, memory: float | None = None) -> Schedule:
    """Return the schedule with the shortest simulated time within the memory; of equals, one that holds less."""
    sizes = costs.activations(shape.ranks * shape.chunks)
    # All rows for this shape are among the attempts, so the result is never worse than one of them within the memory.
    best: tuple[float, float] | None = None
    for attempt in _attempts(shape, costs, math.inf if memory is None else memory):
        with suppress(ScheduleError):  # it does not fit, or takes longer
            # An equal time may hold less: the margin keeps rounding from cutting it off.
            schedule = attempt(best[0] * (1 + 1e-9) if best else math.inf)
            most = max(most_held_by_rank(schedule, sizes))
            key = (simulate(schedule, costs).makespan, most)
            if (memory is None or most <= memory) and (best is None or key < best):
                best, best_schedule = key, schedule
    if best is None:
        least = min(
            max(sum(size for size, here in zip(sizes, placement, strict=True) if here == rank) for rank in placement)
            for placement in _placements(shape)
        )
        raise ValueError(
            f"memory is {memory:g}; one micro-batch takes {least:g} on a rank, so it must be at least that"
        )
    return best_schedule


def _placements(shape: Shape) -> list[tuple[int, ...]]:
    return list(dict.fromkeys(make(shape.ranks, shape.chunks) for make in (loop, vee)))


def _attempts(shape: Shape, costs: Costs, memory: float) -> Iterator[Callable[[float], Schedule]]:
    """Yield functions from a deadline to a schedule."""
    sizes = costs.activations(shape.ranks * shape.chunks)
    limits = {memory}
    rules: list[tuple[tuple[int, ...], float, ListRule]] = []
    # The fixed orders come first, as good ones cut the search short.
    for name, row in ROWS.items():
        try:
            fixed = _fixed_order(row, shape_of(name, shape.ranks, shape.microbatches, shape.chunks))
        except ValueError:  # it is not for this shape
            continue
        yield lambda _, schedule=fixed: schedule  # type: ignore[misc]
        most = max(most_held_by_rank(fixed, sizes))
        limits.add(min(most, memory))
        for limit, patience in product({most, memory}, PATIENCE) if most <= memory else ():
            rules.append((fixed.placement, limit, ListRule(sequence=fixed.ranks, patience=patience)))
    deep = [(True, True), (True, False), (False, True)] if shape.chunks > 1 else [(True, True)]
    priorities = [
        (Kind.INPUT, Kind.FORWARD, Kind.WEIGHT),
        (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT),
        (Kind.INPUT, Kind.WEIGHT, Kind.FORWARD),
        (Kind.BACKWARD, Kind.FORWARD),
    ]
    for placement, limit, priority, (forward, backward), patience in product(
        _placements(shape), sorted(limits), priorities, deep, PATIENCE
    ):
        rules.append((placement, limit, ListRule(priority, forward, backward, patience=patience)))
    for placement, limit, rule in rules:
        yield ListScheduler(shape.microbatches, placement, rule, limit, costs).run
