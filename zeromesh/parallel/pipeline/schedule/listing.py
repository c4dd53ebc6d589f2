"""The list scheduler: a rank that is idle takes, of what it can begin, what comes first by a rule."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

from zeromesh.parallel.pipeline.schedule.actions import Action, Kind, Schedule, ScheduleError
from zeromesh.parallel.pipeline.schedule.simulate import Costs

FORWARD, INPUT, WEIGHT, BACKWARD = Kind.FORWARD, Kind.INPUT, Kind.WEIGHT, Kind.BACKWARD


@dataclass(frozen=True)
class ListRule:
    """Order of preference."""

    # Kinds, the first one first; with the full backward in place of the two gradients it is not split.
    priority: tuple[Kind, ...] = (INPUT, FORWARD, WEIGHT)
    deep_forward: bool = True  # of two forwards, that of the later stage comes first
    deep_backward: bool = True  # the same of two backwards
    # Order of forwards and backwards by rank; weight gradients fill the time in which none can begin.
    sequence: tuple[tuple[Action, ...], ...] | None = None
    patience: float = 0.0  # longest wait for what comes first, in parts of the time of what could begin


class ListScheduler:
    """Scheduler that chooses action by action, at the times that follow from the costs."""

    def __init__(
        self, microbatches: int, placement: tuple[int, ...], rule: ListRule, limit: float, costs: Costs | None = None
    ) -> None:
        costs = costs or Costs()
        self._microbatches, self._placement, self._rule, self._limit = microbatches, placement, rule, limit
        self._backward, self._last = (BACKWARD, BACKWARD) if BACKWARD in rule.priority else (INPUT, WEIGHT)
        stages = range(len(placement))
        self._own = [[stage for stage in stages if placement[stage] == rank] for rank in range(max(placement) + 1)]
        self._sizes = costs.activations(len(placement))
        self._time = {(kind, stage): costs.time(kind, stage) for kind in rule.priority for stage in stages}
        # By the later one of two neighbours.
        self._message = [costs.latency * (s > 0 and placement[s - 1] != placement[s]) for s in stages]
        self._done = {(kind, stage): 0 for kind in rule.priority for stage in stages}
        self._end: dict[tuple[Kind, int, int], float] = {}

    def run(self, deadline: float = math.inf) -> Schedule:
        """Make the schedule. Raise ScheduleError if the limit leaves no room, or it ends after the deadline."""
        orders: list[list[Action]] = [[] for _ in self._own]
        free = [0.0] * len(self._own)
        totals = [sum(time for (_, stage), time in self._time.items() if stage in stages) for stages in self._own]
        left = [time * self._microbatches for time in totals]
        awake = [(0.0, rank) for rank in range(len(orders))]
        while awake:
            clock, rank = heapq.heappop(awake)
            choice = min(self._choices(rank, len(orders[rank]), clock), default=None) if free[rank] <= clock else None
            if choice is None:
                continue
            *_, kind, stage = choice
            patient = clock + self._rule.patience * self._time[kind, stage]
            if patient > clock and min(self._choices(rank, len(orders[rank]), patient))[0] < choice[0]:
                continue  # the preferred action can begin soon, and wakes this rank then
            number = self._done[kind, stage]
            orders[rank].append(Action(kind, stage, number))
            self._done[kind, stage] += 1
            self._end[kind, stage, number] = free[rank] = end = clock + self._time[kind, stage]
            left[rank] -= self._time[kind, stage]
            # The search has found a shorter one already: the rest of this one need not be made.
            if end + left[rank] > deadline:
                raise ScheduleError("time", f"rank {rank} ends after {deadline:g}")
            # Something can begin here when this ends, and at its neighbours when they have the message.
            heapq.heappush(awake, (end, rank))
            for message, neighbour in ((stage, stage - 1), (stage + 1, stage + 1)):
                if 0 <= neighbour < len(self._placement):
                    heapq.heappush(awake, (end + self._message[message], self._placement[neighbour]))
        if sum(map(len, orders)) < len(self._done) * self._microbatches:
            raise ScheduleError(
                "memory", f"activations may take {self._limit:g} on a rank, with which this order gets stuck; raise it"
            )
        return Schedule(self._microbatches, self._placement, tuple(map(tuple, orders)))

    def _choices(self, rank: int, taken: int, clock: float) -> Iterator[tuple[int, int, Kind, int]]:
        """Yield the actions that a rank can begin, with their rank in the order of preference."""
        if self._rule.sequence:
            # Weight gradients are no part of the sequence, so they are not counted for the place in it.
            weights = sum(self._done.get((WEIGHT, stage), 0) for stage in self._own[rank])
            following = self._rule.sequence[rank][taken - weights : taken - weights + 1]
            for kind, stage, _ in following:
                kind = kind if kind is FORWARD else self._backward
                if self._ready(kind, stage, clock):
                    yield 0, 0, kind, stage
                    return
        for order, kind in enumerate(self._rule.priority):
            if self._rule.sequence and kind is not WEIGHT:
                continue
            for stage in self._own[rank]:
                if self._ready(kind, stage, clock):
                    deep = self._rule.deep_forward if kind is FORWARD else self._rule.deep_backward
                    yield order, -stage if deep else stage, kind, stage

    def _ready(self, kind: Kind, stage: int, clock: float) -> bool:
        number = self._done[kind, stage]
        if number == self._microbatches:
            return False
        if kind is WEIGHT:
            return self._done[INPUT, stage] > number
        if kind is not FORWARD and self._done[FORWARD, stage] <= number:
            return False
        neighbour = stage - 1 if kind is FORWARD else stage + 1
        if 0 <= neighbour < len(self._placement):
            end = self._end.get((kind, neighbour, number))
            if end is None or end + self._message[max(stage, neighbour)] > clock:
                return False
        return kind is not FORWARD or self._has_room(stage)

    def _has_room(self, stage: int) -> bool:
        """Return whether, after this forward, micro-batches in progress can be finished in turn, the oldest first."""
        # Then the oldest of all never waits for memory on any rank, so no rank waits for ever.
        stages = self._own[self._placement[stage]]
        begun = {other: self._done[FORWARD, other] + (other == stage) for other in stages}
        ended = {other: self._done[self._last, other] for other in stages}
        free = self._limit - sum(self._sizes[other] * (begun[other] - ended[other]) for other in stages)
        if free < 0 or self._rule.sequence:
            return free >= 0  # a given sequence is known to end
        if free >= sum(self._sizes[other] for other in stages):
            return True  # any one of them has room for all that it can need
        for number in range(min(ended.values()), max(begun.values())):
            if free < sum(self._sizes[other] for other in stages if begun[other] <= number):
                return False
            free += sum(self._sizes[other] for other in stages if begun[other] > number >= ended[other])
        return True
