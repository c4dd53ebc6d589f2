"""Process sets: subsets of ranks that run operations of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zeromesh.horovod.moves import Members
from zeromesh.horovod.world import world_for


class ProcessSet:
    """A set of ranks. It can be used once ``init`` or ``add_process_set`` has taken it.

    Attributes:
        process_set_id: number of the set; None before it is taken, and after it is removed.
        ranks: global ranks, ascending.

    Raises:
        ValueError: ``ranks`` are no whole numbers.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        listed = list(ranks) if isinstance(ranks, Iterable) else [None]
        numbers = [rank for rank in listed if isinstance(rank, int)]
        if len(numbers) < len(listed):
            raise ValueError(f"a process set needs a list of ranks, not {ranks!r}; communicators of MPI are not taken")
        self.process_set_id: int | None = None
        self.ranks: list[int] = sorted(numbers)

    def size(self) -> int | None:
        """Return the number of ranks; None if the set cannot be used."""
        return None if self.process_set_id is None else members_of(self, "ProcessSet.size").size

    def rank(self) -> int | None:
        """Return this rank's place in the set; None if the set cannot be used.

        Raises:
            ValueError: this rank is not in the set.
        """
        return None if self.process_set_id is None else included_members(self, "ProcessSet.rank").rank

    def included(self) -> bool | None:
        """Return whether this rank is in the set; None if the set cannot be used."""
        return None if self.process_set_id is None else members_of(self, "ProcessSet.included").rank >= 0

    def take(self, number: int | None, ranks: Sequence[int]) -> None:
        """Set the number, or None, and the ranks; for this package."""
        self.process_set_id, self.ranks = number, list(ranks)

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet([])
"""All ranks, after ``init``."""
global_process_set.take(0, [])


def members_of(process_set: ProcessSet, call: str) -> Members:
    """Return the members of a set; raise ValueError if it cannot be used."""
    world = world_for(call)
    members = None if process_set.process_set_id is None else world.members.get(process_set.process_set_id)
    if members is None:
        raise ValueError(
            f"{call}: {process_set} is not in use; pass it to hvd.init(process_sets=[...]) or hvd.add_process_set first"
        )
    return members


def included_members(process_set: ProcessSet, call: str) -> Members:
    """Return the members of a set; raise ValueError if it cannot be used, or this rank is not in it."""
    members = members_of(process_set, call)
    if members.rank < 0:
        rank = world_for(call).environment.rank
        raise ValueError(
            f"{call}: rank {rank} is not in {process_set}; call it only where process_set.included() is True"
        )
    return members


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Make a process set of the given ranks usable and return it. All ranks call it, also those that are not in it.

    Raises:
        ValueError: on every rank, if ranks name different sets, or the set exists already.
    """
    world = world_for("add_process_set")
    new_set = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if new_set.process_set_id is not None:
        raise ValueError(f"{new_set} is in use already")
    number = world.submit("add_process_set", None, 0, [], ranks=new_set.ranks)()
    new_set.take(number, new_set.ranks)
    return new_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Give a process set up and return True; False for the global one and one that is not in use. All ranks call it."""
    world = world_for("remove_process_set")
    if not process_set.process_set_id:
        return False
    try:
        world.submit("remove_process_set", None, 0, [], removed=process_set.process_set_id)()
    finally:
        process_set.take(None, process_set.ranks)
    return True


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """Return the ranks of each process set in use, by its number."""
    world = world_for("get_process_set_ids_and_ranks")
    return {number: list(members.ranks) for number, members in world.members.items()}


__all__ = [
    "ProcessSet",
    "add_process_set",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "remove_process_set",
]
