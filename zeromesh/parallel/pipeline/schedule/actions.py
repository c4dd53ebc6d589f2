"""Actions of pipeline ranks, and schedules: the order of each rank's actions, as data.

A schedule's text has one line per rank; what follows a ``#`` is a comment::

    microbatches: 2
    placement: 0 1
    rank 0: F0.0 F0.1 B0.0 B0.1
    rank 1: F1.0 B1.0 F1.1 B1.1

``F1.0`` is the forward of stage 1 for micro-batch 0. ``placement`` has the rank of each stage.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple


class Kind(StrEnum):
    """Kind of an action; the value is its name in texts."""

    FORWARD = "F"
    INPUT = "I"  # the input's gradient alone, which the stage before waits for
    WEIGHT = "W"  # the weights' gradients alone: no other stage waits for them, so they can fill idle time
    BACKWARD = "B"  # both gradients at once
    SEND_ACTIVATION = "SA"
    RECEIVE_ACTIVATION = "RA"
    SEND_GRADIENT = "SG"
    RECEIVE_GRADIENT = "RG"
    RECOMPUTE = "RECOMPUTE"  # activations again, from the stage's input


# Messages are left out: they travel beside a computation and do not keep the device busy.
COMPUTE = frozenset({Kind.FORWARD, Kind.INPUT, Kind.WEIGHT, Kind.BACKWARD, Kind.RECOMPUTE})
BACKWARDS = (Kind.INPUT, Kind.BACKWARD)  # give the gradient that the stage before waits for
LAST = (Kind.WEIGHT, Kind.BACKWARD)  # end a stage's hold on the activations of a micro-batch

MESSAGES = {Kind.SEND_ACTIVATION: (Kind.RECEIVE_ACTIVATION, 1), Kind.SEND_GRADIENT: (Kind.RECEIVE_GRADIENT, -1)}
"""Kind of a send -> kind of its receive, and the receiver's stage relative to the sender's."""

RECEIVES = frozenset(kind for kind, _ in MESSAGES.values())


class Action(NamedTuple):
    """One action of a rank; ``stage`` is one of the rank's own, for messages too."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


class ScheduleError(ValueError):
    """A schedule that cannot be read or run: the kind of fault, and its place where there is one."""

    def __init__(
        self, fault: str, reason: str, schedule: Schedule | None = None, rank: int = -1, position: int = -1
    ) -> None:
        self.fault, self.rank, self.position = fault, rank, position
        self.action = schedule.ranks[rank][position] if schedule and rank >= 0 and position >= 0 else None
        place = f" on rank {rank}" if rank >= 0 else ""
        place += f" at position {position}, {self.action}" if self.action else ""
        grid = f"\n{_around(schedule, rank, position)}" if schedule else ""
        super().__init__(f"{fault}{place}: {reason}{grid}")


@dataclass(frozen=True)
class Schedule:
    """Order of the actions of all ranks; ``placement`` has the rank of each stage."""

    microbatches: int
    placement: tuple[int, ...]
    ranks: tuple[tuple[Action, ...], ...]

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.placement)

    @cached_property
    def present(self) -> frozenset[Action]:
        """All actions of all ranks."""
        return frozenset(action for actions in self.ranks for action in actions)

    @cached_property
    def splits(self) -> bool:
        """True if some backwards are in two parts."""
        return any(kind is Kind.INPUT for kind, _, _ in self.present)

    @cached_property
    def has_messages(self) -> bool:
        """True if sends and receives are among the actions."""
        return any(kind in MESSAGES for kind, _, _ in self.present)

    def of_rank(self, rank: int) -> list[int]:
        """The stages of a rank; the n-th one is its n-th chunk."""
        return [stage for stage, here in enumerate(self.placement) if here == rank]

    def __str__(self) -> str:
        lines = [f"microbatches: {self.microbatches}", f"placement: {' '.join(map(str, self.placement))}"]
        lines += [f"rank {rank}: {' '.join(map(str, actions))}".rstrip() for rank, actions in enumerate(self.ranks)]
        return "\n".join(lines) + "\n"


def loop(ranks: int, chunks: int) -> tuple[int, ...]:
    """Return the placement that begins again at rank 0 with each chunk."""
    return tuple(range(ranks)) * chunks


def vee(ranks: int, chunks: int) -> tuple[int, ...]:
    """Return the placement that turns round at its ends: the first and the last of two chunks share a rank."""
    return tuple(rank if chunk % 2 == 0 else ranks - 1 - rank for chunk in range(chunks) for rank in range(ranks))


_KINDS = {kind.value: kind for kind in Kind}
_ACTION = re.compile(r"([A-Z]+)(\d+)\.(\d+)")
_LINE = re.compile(r"(microbatches|placement|rank (\d+)):(.*)")


def parse(text: str) -> Schedule:
    """Read the text that ``str`` of a schedule gives. Raise ScheduleError, naming the line and the word."""
    head: dict[str, list[int]] = {}
    ranks: list[tuple[Action, ...]] = []
    for number, line in enumerate(text.splitlines(), 1):
        content, place = line.split("#")[0].strip(), f"line {number}"
        if not content:
            continue
        match = _LINE.fullmatch(content)
        if not match:
            raise unreadable(place, content.split()[0], "a line begins with 'microbatches:', 'placement:' or 'rank N:'")
        name, rank, words = match[1], match[2], match[3].split()
        if rank is not None:
            # A rank's number is checked, although the order gives it, because a line that was lost would shift all
            # ranks below.
            if int(rank) != len(ranks):
                raise unreadable(place, name, f"ranks are written in order, so this is the line of rank {len(ranks)}")
            ranks.append(tuple(read_action(word, place) for word in words))
            continue
        if name in head:
            raise unreadable(place, name, "there is such a line already; leave one of them out")
        if wrong := [word for word in words if not word.isdecimal()]:
            raise unreadable(place, wrong[0], "it must be a whole number")
        head[name] = [int(word) for word in words]
    for name, count, rule in (("microbatches", 1, "one number"), ("placement", None, "a rank per stage")):
        if not head.get(name) or count not in (None, len(head[name])):
            raise unreadable("line 1", name, f"there must be a line '{name}:' with {rule}")
    return Schedule(head["microbatches"][0], tuple(head["placement"]), tuple(ranks))


def read_action(word: str, place: str) -> Action:
    """Return the action that a word such as ``F0.1`` means. Raise ScheduleError, naming the place of the word."""
    match = _ACTION.fullmatch(word)
    if not match or match[1] not in _KINDS:
        rule = f"an action is one of {', '.join(Kind)} with a stage and a micro-batch, as in F0.1"
        raise unreadable(place, word, rule)
    return Action(_KINDS[match[1]], int(match[2]), int(match[3]))


def unreadable(place: str, word: str, rule: str) -> ScheduleError:
    """Return the error for a word that cannot be read."""
    return ScheduleError("unreadable text", f"{place}, {word!r}: {rule}")


SHOWN = 6  # actions before and after a fault that an error shows; whole schedules have hundreds


def _around(schedule: Schedule, rank: int, position: int) -> str:
    """The actions of all ranks near a position, that of one rank marked."""
    first = max(position - SHOWN, 0)
    rows: list[Sequence[str]] = []
    for number, actions in enumerate(schedule.ranks):
        shown = enumerate(actions[first : max(position, 0) + SHOWN + 1], first)
        rows.append([f">{action}<" if (number, at) == (rank, position) else f" {action} " for at, action in shown])
    width = max((len(word) for row in rows for word in row), default=0)
    dots = "... " if first else ""
    return "\n".join(
        f"rank {number}: {dots}{''.join(word.ljust(width) for word in row)}".rstrip() for number, row in enumerate(rows)
    )
