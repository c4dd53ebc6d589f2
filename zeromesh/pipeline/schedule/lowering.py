"""Passes that complete a schedule. Each takes a schedule and returns a new one.

They can be done in any order. Messages come best last, so that nothing delays the send of a result.
"""

from __future__ import annotations

from collections.abc import Sequence

from zeromesh.pipeline.schedule.actions import BACKWARDS, COMPUTE, MESSAGES, Action, Kind, Schedule
from zeromesh.pipeline.schedule.execution import execute, received_by
from zeromesh.pipeline.schedule.simulate import Costs, simulate


def forward_only(placement: Sequence[int], microbatches: int) -> Schedule:
    """Return a schedule for evaluation: forwards of any number of micro-batches, on the placement of a training.

    Of the forwards that can begin, a rank does that of the latest stage, so few micro-batches are under way at once.
    """
    done = [0] * len(placement)
    ranks: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
    while done[-1] < microbatches:
        ready = [microbatches, *done]
        busy = set()
        for stage, rank in reversed([*enumerate(placement)]):
            if rank not in busy and done[stage] < ready[stage]:
                ranks[rank].append(Action(Kind.FORWARD, stage, done[stage]))
                done[stage] += 1
                busy.add(rank)
    return Schedule(microbatches, tuple(placement), tuple(map(tuple, ranks)))


def add_messages(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """Add a send and a receive wherever a stage's neighbour is on another rank.

    The actions of all ranks are put into one order, by the simulated times of their ends, with each message right after
    the computation of its tensor. A rank's list is its part of that order. So any two ranks have their messages in the
    same order, and no rank waits for ever, even if sends wait for their receives: the first action of all that are left
    can always be done. A receive comes before computations that end after the send, so it begins before it is needed.
    """
    if schedule.has_messages:
        raise ValueError("this schedule has its messages already; add them once, after the other passes")
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
    return _with(schedule, ranks)


def _send_of(schedule: Schedule, action: Action) -> Action | None:
    kind, stage, _ = action
    if kind is Kind.FORWARD:
        send = action._replace(kind=Kind.SEND_ACTIVATION)
    elif kind in BACKWARDS:
        send = action._replace(kind=Kind.SEND_GRADIENT)
    else:
        return None
    other = stage + MESSAGES[send.kind][1]
    if not 0 <= other < schedule.stages or schedule.placement[other] == schedule.placement[stage]:
        return None
    return send


def add_recompute(schedule: Schedule, stages: Sequence[int] | None = None) -> Schedule:
    """Compute activations again right before each backward, of all stages or of some.

    It does not wait for the gradient, so it can fill the time until that comes.
    """
    ranks: list[list[Action]] = []
    for actions in schedule.ranks:
        order: list[Action] = []
        for action in actions:
            if action.kind in BACKWARDS and (stages is None or action.stage in stages):
                order.append(action._replace(kind=Kind.RECOMPUTE))
            order.append(action)
        ranks.append(order)
    return _with(schedule, ranks)


def _with(schedule: Schedule, ranks: Sequence[Sequence[Action]]) -> Schedule:
    return Schedule(schedule.microbatches, schedule.placement, tuple(map(tuple, ranks)))
