"""When each action of a schedule begins and ends, by the time that actions take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from zeromesh.base import clock
from zeromesh.base.clock import ResourceUse
from zeromesh.parallel.pipeline.schedule.actions import COMPUTE, RECEIVES, Action, Kind, Schedule
from zeromesh.parallel.pipeline.schedule.execution import dependencies, execute

# What goes on beside the ranks: messages to a forward and to other actions, and what a stage's first forward waits for.
OUTPUT, GRADIENT, ARRIVAL, RELEASE = "output", "gradient", "arrival", "release"

PerStage = float | Sequence[float]  # one number for all stages, or one for each


@dataclass(frozen=True)
class Costs:
    """Times of actions, in any unit, and memory of activations."""

    forward: PerStage = 1.0  # time of a micro-batch's forward, and of its recomputation
    input: PerStage = 1.0  # of its input gradient
    weight: PerStage = 1.0  # of its weight gradient
    backward: PerStage | None = None  # of both at once; None: their sum
    latency: float = 0.0  # of a message between two ranks
    activation: PerStage = 1.0  # memory of what a stage keeps of a micro-batch for its backward

    def time(self, kind: str, stage: int) -> float:
        """Return the time that an action of this kind takes the stage's rank; 0 for others."""
        # It is given by itself where both at once take another time than one after the other.
        if kind in (Kind.FORWARD, Kind.RECOMPUTE):
            return of_stage(self.forward, stage)
        if kind is Kind.BACKWARD and self.backward is not None:
            return of_stage(self.backward, stage)
        needs_input, needs_weight = kind in (Kind.INPUT, Kind.BACKWARD), kind in (Kind.WEIGHT, Kind.BACKWARD)
        time = of_stage(self.input, stage) if needs_input else 0.0
        return time + of_stage(self.weight, stage) if needs_weight else time

    @property
    def stages(self) -> int | None:
        """Number of stages that have times of their own; None: all have the same."""
        lists = [len(value) for value in (self.forward, self.input, self.weight) if isinstance(value, Sequence)]
        return lists[0] if lists else None

    def activations(self, stages: int) -> list[float]:
        """Return the memory of one micro-batch's activations, by stage."""
        return [of_stage(self.activation, stage) for stage in range(stages)]


def of_stage(value: PerStage, stage: int) -> float:
    """Return a stage's own number."""
    return value if isinstance(value, int | float) else value[stage]


@dataclass(frozen=True)
class TimedAction:
    """An action and when it is done; measured times have this form too."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The actions of each rank with their times, in order."""

    schedule: Schedule
    ranks: tuple[tuple[TimedAction, ...], ...]

    @cached_property
    def makespan(self) -> float:
        """Time at which the last action ends."""
        return max((step.end for steps in self.ranks for step in steps), default=0.0)

    @property
    def computed(self) -> list[list[TimedAction]]:
        """Computations of each rank that take time."""
        return [[step for step in row if step.action.kind in COMPUTE and step.end > step.start] for row in self.ranks]

    @cached_property
    def bubbles(self) -> list[float]:
        """Idle time of each rank between its first and its last computation, in parts of its busy time."""
        shares = []
        for computed in self.computed:
            # The formulas of papers divide by busy time, not by the whole; so figures here can be compared with theirs.
            busy = sum(step.end - step.start for step in computed)
            shares.append((computed[-1].end - computed[0].start - busy) / busy if computed else 0.0)
        return shares

    @property
    def bubble(self) -> float:
        """The largest idle share of any rank."""
        return max(self.bubbles, default=0.0)


@dataclass(frozen=True)
class Program:
    """A schedule for the clock: releases of the stages, what ranks do, and messages between them."""

    uses: tuple[ResourceUse, ...]
    costs: tuple[tuple[str, int], ...]  # of each use, what its seconds are given for: a kind or purpose, and a stage
    done: tuple[tuple[int, int, Action], ...]  # position, rank and action of what ranks do, in a possible order

    @classmethod
    def of(cls, schedule: Schedule) -> Program:
        """Return the program of a schedule; raise ScheduleError if it deadlocks."""
        uses = [ResourceUse(None)] * schedule.stages
        costs: list[tuple[str, int]] = [(RELEASE, stage) for stage in range(schedule.stages)]
        done: list[tuple[int, int, Action]] = []
        ends: dict[Action, int] = {}  # position of what ends an action

        def add(resource: int | None, after: Sequence[int], label: str, cost: str, stage: int) -> int:
            uses.append(ResourceUse(resource, tuple(after), label))
            costs.append((cost, stage))
            return len(uses) - 1

        for rank, position in execute(schedule):
            action = schedule.ranks[rank][position]
            kind, stage, microbatch = action
            needs = [stage] if kind is Kind.FORWARD and microbatch == 0 else []
            for other in dependencies(schedule, action):
                needs.append(ends[other])
                if schedule.placement[other.stage] != rank:
                    needs[-1] = add(None, needs[-1:], "", OUTPUT if kind is Kind.FORWARD else GRADIENT, stage)
            # Only computation keeps a rank busy: messages are begun in their turn and go on beside it, and what needs
            # them waits. A receive is begun before its message is there.
            receives = kind in RECEIVES
            here = add(rank, () if receives else needs, f"{kind} stage {stage}", kind, stage)
            ends[action] = add(None, [here, *needs], "", ARRIVAL, stage) if receives else here
            done.append((here, rank, action))
        return cls(tuple(uses), tuple(costs), tuple(done))


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Follow a schedule, with or without its messages written out. Raise ScheduleError if it deadlocks."""
    costs, program = costs or Costs(), Program.of(schedule)
    times = {key: costs.latency if key[0] in (OUTPUT, GRADIENT) else costs.time(*key) for key in {*program.costs}}
    starts, ends = clock.simulate(program.uses, [times[key] for key in program.costs])
    ranks: list[list[TimedAction]] = [[] for _ in schedule.ranks]
    for position, rank, action in program.done:
        ranks[rank].append(TimedAction(rank, action, starts[position], ends[position]))
    return Timeline(schedule, tuple(map(tuple, ranks)))
