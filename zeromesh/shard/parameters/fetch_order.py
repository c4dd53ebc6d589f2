"""Order in which units are fetched, and whose slots they take: the rule of the engine and of the planner's clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

FAR = 1 << 30  # a distance to a use that never comes


def distance_to(plan: Sequence[int], unit: int, position: int) -> int:
    """Return the number of steps of a plan from a position on to the next use of a unit."""
    try:
        return plan.index(unit, position) - position
    except ValueError:
        return FAR


def farthest(plan: Sequence[int], position: int, units: Iterable[int], sooner_than: int) -> int | None:
    """Return the unit that is used last, and later than ``sooner_than`` uses from now; None if there is none."""
    # Belady's choice: the unit whose next use is farthest. The next uses are known, since a backward uses the units
    # in the reverse order of the forward before it, and a forward mostly repeats the one before.
    best, most = None, sooner_than if sooner_than != FAR else -1
    for unit in units:
        distance = distance_to(plan, unit, position)
        if distance > most:
            best, most = unit, distance
    return best


@lru_cache(maxsize=256)
def fetches(plan: tuple[int, ...], slots: int, resident: frozenset[int] = frozenset()) -> tuple[tuple[int, ...], ...]:
    """Return the units whose fetches begin before the first use of a plan, and with each of its uses.

    Args:
        plan: units of equal sizes in the order of their uses.
        slots: units that are in memory at once, at least one.
        resident: units that are in memory before.
    """
    there = set(resident)

    def begun(position: int) -> Iterator[int]:
        used = plan[position - 1 : position] if position else ()  # it cannot leave
        for distance, unit in [*((FAR, unit) for unit in used), *enumerate(plan[position:])]:
            if unit in there:
                continue
            if len(there) == slots:
                victim = farthest(plan, position, sorted(there.difference(used)), distance)
                if victim is None:
                    return  # all others are used sooner than this one
                there.remove(victim)
            there.add(unit)
            yield unit

    return tuple(tuple(begun(position)) for position in range(len(plan) + 1))
