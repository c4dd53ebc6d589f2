"""Passes that complete a schedule. Each takes a schedule and returns a new one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from zeromesh.parallel.pipeline.schedule.actions import BACKWARDS, COMPUTE, MESSAGES, Action, Kind, Schedule
from zeromesh.parallel.pipeline.schedule.execution import execute, received_by
from zeromesh.parallel.pipeline.schedule.simulate import Costs, simulate


def forward_only(placement: Sequence[int], microbatches: int) -> Schedule:
    """Return a schedule for evaluation: forwards of any number of micro-batches, on the placement of a training."""
    done = [0] * len(placement)
    ranks: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
    while done[-1] < microbatches:
        # As of the begin of this turn: what a stage gives in it can be used in the next one only.
        ready = [microbatches, *done]
        busy = set()
        # The latest stage first, so that few micro-batches are under way at once.
        for stage, rank in reversed([*enumerate(placement)]):
            if rank not in busy and done[stage] < ready[stage]:
                ranks[rank].append(Action(Kind.FORWARD, stage, done[stage]))
                done[stage] += 1
                busy.add(rank)
    return Schedule(microbatches, tuple(placement), tuple(map(tuple, ranks)))


def add_messages(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """Add a send and a receive wherever a stage's neighbour is on another rank. It is the last pass."""
    if schedule.has_messages:
        raise ValueError("this schedule has its messages already; add them once, after the other passes")
    # All actions are put into one order, by the simulated times of their ends, with each message right after the
    # computation of its tensor; a rank's list is its part of that order. Any two ranks then have their messages in one
    # order, so no rank waits for ever, even if sends wait for their receives: the first action of all that are left
    # can always be done. A receive comes before computations that end after the send, so it begins before it is needed.
    order = {place: number for number, place in enumerate(execute(schedule))}
    places = []
    for rank, steps in enumerate(simulate(schedule, costs).ranks):
        end = 0.0
        for at, step in enumerate(steps):
            # A message that goes on beside a computation is begun after the computation before it.
            end = step.end if step.action.kind in COMPUTE else end
            places.append((end, order[rank, at], rank, step.action))
    ranks: list[list[Action]] = [[] for _ in schedule.ranks]
    for _, _, rank, action in sorted(places):
        ranks[rank].append(action)
        if send := _send_of(schedule, action):
            receive = received_by(send)
            ranks[rank].append(send)
            ranks[schedule.placement[receive.stage]].append(receive)
    return replace(schedule, ranks=tuple(map(tuple, ranks)))


def _send_of(schedule: Schedule, action: Action) -> Action | None:
    if action.kind is not Kind.FORWARD and action.kind not in BACKWARDS:
        return None
    send = action._replace(kind=Kind.SEND_ACTIVATION if action.kind is Kind.FORWARD else Kind.SEND_GRADIENT)
    other, placement = action.stage + MESSAGES[send.kind][1], schedule.placement
    return send if 0 <= other < schedule.stages and placement[other] != placement[action.stage] else None


def split_backwards(schedule: Schedule) -> Schedule:
    """Compute input gradients that another rank waits for apart from weight gradients, which follow at once.

    The message is then sent, and the other rank goes on, before the weight gradients are computed.
    """

    def split(action: Action) -> list[Action]:
        splits = action.kind is Kind.BACKWARD and _send_of(schedule, action) is not None
        return [action._replace(kind=kind) for kind in (Kind.INPUT, Kind.WEIGHT)] if splits else [action]

    return _replaced(schedule, split)


def add_recompute(schedule: Schedule, stages: Sequence[int] | None = None) -> Schedule:
    """Compute activations again right before each backward, of all stages or of some."""

    def add(action: Action) -> list[Action]:
        recomputes = action.kind in BACKWARDS and (stages is None or action.stage in stages)
        # It does not wait for the gradient, so it can fill the time until that comes.
        return [action._replace(kind=Kind.RECOMPUTE), action] if recomputes else [action]

    return _replaced(schedule, add)


def _replaced(schedule: Schedule, actions_for: Callable[[Action], list[Action]]) -> Schedule:
    ranks = (tuple(new for action in actions for new in actions_for(action)) for actions in schedule.ranks)
    return replace(schedule, ranks=tuple(ranks))
