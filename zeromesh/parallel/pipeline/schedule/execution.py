"""Dependencies of actions, and a check that ranks that follow a schedule get to its end."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

from zeromesh.parallel.pipeline.schedule.actions import LAST, MESSAGES, Action, Kind, Schedule, ScheduleError


def input_gradient(schedule: Schedule, stage: int, microbatch: int) -> Action:
    """Return the action that gives the stage before the gradient of its outputs."""
    split = Action(Kind.INPUT, stage, microbatch)
    return split if split in schedule.present else Action(Kind.BACKWARD, stage, microbatch)


def dependencies(schedule: Schedule, action: Action) -> Iterator[Action]:
    """Yield the actions that must precede an action."""
    kind, stage, microbatch = action
    if kind is Kind.FORWARD:
        if stage > 0:
            yield _from_neighbour(schedule, action, Kind.RECEIVE_ACTIVATION, Action(kind, stage - 1, microbatch))
    elif kind in (Kind.INPUT, Kind.BACKWARD):
        yield Action(Kind.FORWARD, stage, microbatch)
        if stage < schedule.stages - 1:
            after = input_gradient(schedule, stage + 1, microbatch)
            yield _from_neighbour(schedule, action, Kind.RECEIVE_GRADIENT, after)
        # Without recomputation the activations were kept.
        again = Action(Kind.RECOMPUTE, stage, microbatch)
        if again in schedule.present:
            yield again
    elif kind is Kind.WEIGHT:
        # Its operands are left by the input gradient of the same micro-batch.
        yield Action(Kind.INPUT, stage, microbatch)
    elif kind is Kind.SEND_GRADIENT:
        yield input_gradient(schedule, stage, microbatch)
    elif kind is Kind.RECEIVE_ACTIVATION:
        yield Action(Kind.SEND_ACTIVATION, stage - 1, microbatch)
    elif kind is Kind.RECEIVE_GRADIENT:
        yield Action(Kind.SEND_GRADIENT, stage + 1, microbatch)
    else:
        yield Action(Kind.FORWARD, stage, microbatch)


def _from_neighbour(schedule: Schedule, action: Action, receive: Kind, source: Action) -> Action:
    """Return the action that brings another stage's result: a message, or the computation on the same rank."""
    # Before messages are added, a schedule depends on the neighbour's computation itself.
    apart = schedule.placement[source.stage] != schedule.placement[action.stage]
    return action._replace(kind=receive) if apart and schedule.has_messages else source


def received_by(send: Action) -> Action:
    """Return the receive of a send."""
    kind, distance = MESSAGES[send.kind]
    return Action(kind, send.stage + distance, send.microbatch)


def execute(schedule: Schedule, rendezvous: bool = False) -> list[tuple[int, int]]:
    """Return rank and position of all actions, in an order in which they can happen.

    A rank does its next action as soon as the actions that it depends on have been done. With ``rendezvous``, a send
    waits until the other rank receives; else messages are buffered. Raise ScheduleError for a deadlock.
    """
    order: list[tuple[int, int]] = []
    done: set[Action] = set()
    reached: set[Action] = set()
    # Ranks are woken by what they wait for. Asking all ranks again after each action would take quadratic time, and the
    # search executes hundreds of schedules.
    waiting: dict[tuple[bool, Action], list[int]] = defaultdict(list)
    waits: dict[int, Action] = {}
    position = [0] * len(schedule.ranks)
    awake = deque(range(len(schedule.ranks)))
    while awake:
        rank = awake.popleft()
        actions = schedule.ranks[rank]
        waits.pop(rank, None)
        while position[rank] < len(actions):
            action = actions[position[rank]]
            if action not in reached:
                reached.add(action)
                awake.extend(waiting.pop((True, action), ()))
            missing = next(((False, need) for need in dependencies(schedule, action) if need not in done), None)
            # Without buffers, a send is done only once the other rank has come to its receive.
            if missing is None and rendezvous and action.kind in MESSAGES and received_by(action) not in reached:
                missing = True, received_by(action)
            if missing:
                waiting[missing].append(rank)
                waits[rank] = missing[1]
                break
            done.add(action)
            order.append((rank, position[rank]))
            position[rank] += 1
            awake.extend(waiting.pop((False, action), ()))
    if waits:
        raise _stuck(schedule, position, dict(sorted(waits.items())))
    return order


def _stuck(schedule: Schedule, position: Sequence[int], waits: dict[int, Action]) -> ScheduleError:
    # A wait inside one rank, or for an action that is nowhere, explains a deadlock better than the circle of ranks
    # does.
    for rank, need in waits.items():
        place = schedule, rank, position[rank]
        if need in schedule.ranks[rank]:
            return ScheduleError("wrong order", f"{need} of the same rank must come before it", *place)
        if need not in schedule.present:
            return ScheduleError("missing action", f"it needs {need}, which no rank does", *place)
    listed = "; ".join(
        f"rank {rank} at {schedule.ranks[rank][position[rank]]} waits for {need}" for rank, need in waits.items()
    )
    rank = next(iter(waits))
    return ScheduleError("deadlock", f"{listed}; reorder one of them", schedule, rank, position[rank])


def held(schedule: Schedule, sizes: Sequence[float] | None = None) -> list[list[tuple[int, float, float]]]:
    """Return the stage of each action of each rank, and how much the stage and the rank hold after it.

    ``sizes`` are those of one micro-batch's activations by stage; by default 1 each, which counts micro-batches.
    """
    by_rank = []
    for actions in schedule.ranks:
        now: dict[int, float] = defaultdict(float)
        rows = []
        for kind, stage, _ in actions:
            size = 1.0 if sizes is None else sizes[stage]
            now[stage] += size * ((kind is Kind.FORWARD) - (kind in LAST))
            rows.append((stage, now[stage], sum(now.values())))
        by_rank.append(rows)
    return by_rank


def most_held_by_stage(schedule: Schedule) -> list[int]:
    """Return the largest number of micro-batches whose activations each stage holds at once."""
    counts = [(stage, int(count)) for rows in held(schedule) for stage, count, _ in rows]
    return [max((count for other, count in counts if other == stage), default=0) for stage in range(schedule.stages)]


def most_held_by_rank(schedule: Schedule, sizes: Sequence[float] | None = None) -> list[float]:
    """Return the most that the stages of each rank hold together."""
    # It is not the sum of the stages' most, which they reach at different times.
    return [max((0.0, *(total for _, _, total in rows))) for rows in held(schedule, sizes)]
