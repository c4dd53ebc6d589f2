"""Passes that add to a schedule what is not named when it is made. Each takes a schedule and gives a new one.

A run does messages and recomputation. What ``add_fetches``, ``add_offload`` and ``add_update`` add is for plans: it can
be checked, timed and drawn, and a run refuses it.
They can be done in any order. Messages come best last, so that nothing stands between a result and its way out.
"""

from __future__ import annotations

from collections.abc import Sequence

from zeromesh.pipeline.schedule.actions import COMPUTE, MESSAGES, Action, Kind, Schedule
from zeromesh.pipeline.schedule.execution import execute, received_by
from zeromesh.pipeline.schedule.simulate import Costs, simulate

BACKWARDS = (Kind.INPUT, Kind.BACKWARD)
LAST = (Kind.WEIGHT, Kind.BACKWARD)


def forward_only(placement: Sequence[int], microbatches: int) -> Schedule:
    """For evaluation: the forwards of any number of micro-batches, whatever trains on that placement of the stages.

    A rank takes, of what can begin, the latest stage: what was begun is done with before more is.
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

    All that ranks do is put into one order, by the times at which it would end, with each message right after what it
    brings was computed; a rank's list is its part of that order. So any two ranks have their messages in one order, and
    nothing waits for ever, even if sends wait for their receives: what is first of all can always be done. A receive
    comes before computations that end later than the message is sent, so it is begun before it is needed.
    """
    if schedule.has_messages:
        raise ValueError("this schedule has its messages already; add them once, after the other passes")
    order = {place: number for number, place in enumerate(execute(schedule))}
    places = []
    for rank, steps in enumerate(simulate(schedule, costs).ranks):
        end = 0.0
        for at, step in enumerate(steps):
            # What goes on beside the computation is begun after the computation before it.
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


def add_fetches(schedule: Schedule, slots: int = 1, ahead: int = 1) -> Schedule:
    """Add, for plans, what sharded stages need: a fetch before a stage's turn, and a reduce after its last backward.

    Args:
        schedule: any.
        slots: so many stages a rank keeps at once; that which it used longest ago is given up for the next one.
        ahead: a fetch is begun so many computations early, and takes a slot more in that time.
    """
    ranks = []
    for actions in schedule.ranks:
        places = [at for at, action in enumerate(actions) if action.kind in COMPUTE]
        final = {action.stage: at for at, action in enumerate(actions) if action.kind in LAST}
        fetches: dict[int, list[Action]] = {}
        kept: list[int] = []
        used: dict[int, int] = {}
        for turn, at in enumerate(places):
            stage = actions[at].stage
            if stage not in kept:
                early = max(turn - ahead, used.get(stage, -1) + 1)
                fetches.setdefault(places[early], []).append(Action(Kind.FETCH, stage))
            kept = [*(other for other in kept if other != stage), stage][-slots:]
            used[stage] = turn
        order: list[Action] = []
        for at, action in enumerate(actions):
            order += [*fetches.get(at, ()), action]
            if final.get(action.stage) == at:
                order.append(Action(Kind.REDUCE, action.stage))
        ranks.append(order)
    return _with(schedule, ranks)


def add_recompute(schedule: Schedule, stages: Sequence[int] | None = None) -> Schedule:
    """Compute activations again right before each backward, of all stages or of some.

    It does not wait for the gradient, so it can fill the time until that comes.
    """
    return _before_backwards(schedule, stages, Kind.RECOMPUTE, 0)


def add_offload(schedule: Schedule, stages: Sequence[int] | None = None, ahead: int = 1) -> Schedule:
    """Take activations off the device after each forward, and have them back for the backward; for plans.

    Args:
        schedule: any.
        stages: of which; all if left out.
        ahead: so many computations before the backward, the way back begins. Where the forward is no longer ago than
            that, activations stay.
    """
    if ahead < 1:
        raise ValueError(f"ahead is {ahead}; it must be at least 1, for activations to be back when they are needed")
    return _before_backwards(schedule, stages, Kind.RELOAD, ahead)


def _before_backwards(schedule: Schedule, stages: Sequence[int] | None, kind: Kind, ahead: int) -> Schedule:
    ranks = []
    for actions in schedule.ranks:
        places = [at for at, action in enumerate(actions) if action.kind in COMPUTE]
        turns = {actions[at]: turn for turn, at in enumerate(places)}
        before: dict[int, list[Action]] = {}
        after: dict[int, Action] = {}
        for turn, at in enumerate(places):
            action = actions[at]
            if action.kind not in BACKWARDS or (stages is not None and action.stage not in stages):
                continue
            forward = turns[action._replace(kind=Kind.FORWARD)]
            if kind is Kind.RELOAD:
                if turn - ahead <= forward + 1:
                    continue
                after[places[forward]] = action._replace(kind=Kind.OFFLOAD)
            before.setdefault(places[turn - ahead], []).append(action._replace(kind=kind))
        ranks.append([
            each for at, action in enumerate(actions)
            for each in (*before.get(at, ()), action, *([after[at]] if at in after else ()))
        ])  # fmt: skip
    return _with(schedule, ranks)


def add_update(schedule: Schedule, ties: Sequence[Sequence[int]] = ()) -> Schedule:
    """Add, for plans, the end of a step: sums of tied gradients, in one order on all ranks, and all stages' updates.

    Args:
        schedule: any.
        ties: of each tied parameter, the stages that have it.
    """
    ranks = []
    for rank, actions in enumerate(schedule.ranks):
        own = schedule.of_rank(rank)
        tied = [Action(Kind.TIE, stage, tie) for tie, stages in enumerate(ties) for stage in own if stage in stages]
        ranks.append([*actions, *tied, *(Action(Kind.UPDATE, stage) for stage in own)])
    return _with(schedule, ranks)


def _with(schedule: Schedule, ranks: Sequence[Sequence[Action]]) -> Schedule:
    return Schedule(schedule.microbatches, schedule.placement, tuple(map(tuple, ranks)))
