"""Validation of a schedule before it is run."""

from __future__ import annotations

from collections import defaultdict

from zeromesh.parallel.pipeline.schedule.actions import MESSAGES, RECEIVES, Action, Kind, Schedule, ScheduleError
from zeromesh.parallel.pipeline.schedule.execution import execute, held, received_by
from zeromesh.parallel.pipeline.schedule.simulate import Costs


def validate(
    schedule: Schedule,
    memory: float | None = None,
    costs: Costs | None = None,
    rendezvous: bool = False,
    training: bool = True,
    messages: bool = False,
) -> None:
    """Check that a schedule is complete, that its messages match, and that its ranks get to its end.

    Args:
        schedule: with or without its messages.
        memory: limit of a rank's activations, in the unit of ``costs``; by default 1 for each micro-batch and stage.
        costs: for the memory of activations.
        rendezvous: also check that ranks get to the end where a send waits for its receive.
        training: require backwards; else there must be none.
        messages: require those between the ranks, as for a run.

    Raises:
        ScheduleError: the first fault, with its kind, its place and what would be right.
    """
    # The order matters: each check relies on those before, as execute() does on actions that exist once.
    _check_places(schedule)
    _check_complete(schedule, training)
    if messages and not schedule.has_messages:
        _require_messages(schedule)
    if schedule.has_messages:
        _check_messages(schedule)
    execute(schedule)
    if rendezvous:
        execute(schedule, rendezvous=True)
    if memory is not None and training:
        _check_memory(schedule, memory, costs or Costs())


def _check_places(schedule: Schedule) -> None:
    """Check that every action is of an existing stage and micro-batch, on the stage's rank, once."""
    ranks = len(schedule.ranks)
    if schedule.microbatches < 1 or not all(0 <= rank < ranks for rank in schedule.placement):
        description = f"{schedule.microbatches} micro-batches, and orders of {ranks} ranks for {schedule.placement}"
        rule = "there must be a micro-batch, and an order for each of the ranks"
        raise ScheduleError("wrong placement", f"{description}; {rule}")
    seen: set[Action] = set()
    for rank, actions in enumerate(schedule.ranks):
        for position, action in enumerate(actions):
            place = schedule, rank, position
            if not 0 <= action.stage < schedule.stages:
                raise ScheduleError("unknown stage", f"there are stages 0 to {schedule.stages - 1}", *place)
            if action.microbatch not in range(schedule.microbatches):
                last = schedule.microbatches - 1
                raise ScheduleError("unknown micro-batch", f"there are micro-batches 0 to {last}", *place)
            if schedule.placement[action.stage] != rank:
                right = schedule.placement[action.stage]
                raise ScheduleError("wrong rank", f"stage {action.stage} is on rank {right}; move it there", *place)
            if action in seen:
                raise ScheduleError("done twice", "it has been done already; leave one of them out", *place)
            seen.add(action)


def _check_complete(schedule: Schedule, training: bool) -> None:
    """Check that every stage has every micro-batch's forward, and its backward, whole or in both parts."""
    present = schedule.present
    for stage, rank in enumerate(schedule.placement):
        for microbatch in range(schedule.microbatches):
            forward, inputs, weight, backward = (
                Action(kind, stage, microbatch) in present
                for kind in (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT, Kind.BACKWARD)
            )
            name = f"{stage}.{microbatch}"
            if not forward:
                raise ScheduleError("missing action", f"there is no F{name}", schedule, rank)
            if not training and (inputs or weight or backward):
                reason = f"only forwards are wanted; {name} has a backward"
                raise ScheduleError("needless action", reason, schedule, rank)
            if not training and (again := Action(Kind.RECOMPUTE, stage, microbatch)) in present:
                reason = "activations are recomputed for a backward, and there is none; leave it out"
                raise ScheduleError("needless action", reason, schedule, rank, schedule.ranks[rank].index(again))
            if backward and (inputs or weight):
                reason = f"B{name} does what {'I' if inputs else 'W'}{name} does; take one of them"
                raise ScheduleError("done twice", reason, schedule, rank)
            if training and not backward and not (inputs and weight):
                wanted = f"W{name}" if inputs else f"I{name}" if weight else f"B{name}, or I{name} and W{name}"
                raise ScheduleError("missing action", f"there is no {wanted}", schedule, rank)


def _require_messages(schedule: Schedule) -> None:
    """Check that no stage waits for one of another rank, in a schedule without messages."""
    for rank, actions in enumerate(schedule.ranks):
        for position, (kind, stage, microbatch) in enumerate(actions):
            if kind is Kind.FORWARD and stage > 0 and schedule.placement[stage - 1] != rank:
                receive = Action(Kind.RECEIVE_ACTIVATION, stage, microbatch)
                reason = f"it needs {receive}, and there are no messages; add them with lowering.add_messages"
                raise ScheduleError("missing action", reason, schedule, rank, position)


def _check_messages(schedule: Schedule) -> None:
    """Check that each send has its receive, and that two ranks have their messages in the same order."""
    sent: dict[tuple[int, int], list[Action]] = defaultdict(list)
    received: dict[tuple[int, int], list[tuple[Action, int]]] = defaultdict(list)
    sends = {kind: (send, distance) for send, (kind, distance) in MESSAGES.items()}
    for rank, actions in enumerate(schedule.ranks):
        for position, action in enumerate(actions):
            place = schedule, rank, position
            if action.kind in MESSAGES:
                other = received_by(action)
            elif action.kind in RECEIVES:
                send, distance = sends[action.kind]
                other = Action(send, action.stage - distance, action.microbatch)
            else:
                continue
            if other not in schedule.present:
                raise ScheduleError("unmatched message", f"there is no {other}; add it", *place)
            peer = schedule.placement[other.stage]
            if peer == rank:
                raise ScheduleError("needless message", "both stages are on this rank; leave it out", *place)
            if action.kind in MESSAGES:
                sent[rank, peer].append(other)
            else:
                received[peer, rank].append((action, position))
    # A receive takes the next message from its rank, so another order would mix up the tensors.
    for (sender, receiver), arrivals in received.items():
        for (action, position), due in zip(arrivals, sent[sender, receiver], strict=True):
            if action != due:
                reason = f"rank {sender} sends what {due} receives before; both must have the same order"
                raise ScheduleError("message order", reason, schedule, receiver, position)


def _check_memory(schedule: Schedule, memory: float, costs: Costs) -> None:
    for rank, rows in enumerate(held(schedule, costs.activations(schedule.stages))):
        for position, (_, _, total) in enumerate(rows):
            if total > memory:
                reason = f"activations take {total:g} of {memory:g}; do a backward before it"
                raise ScheduleError("memory", reason, schedule, rank, position)
