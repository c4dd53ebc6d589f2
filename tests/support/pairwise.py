"""A small set of combinations in which every pair of values of two factors occurs."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

CANDIDATES = 20
"""Random orders in which the factors are filled, per combination; the one that covers most pairs is taken."""

Item = tuple[str, int]
"""A factor, and the number of one of its values."""


def pairwise(factors: Mapping[str, Sequence[Any]], seed: int) -> list[dict[str, Any]]:
    """Return combinations of one value per factor that cover all pairs, greedily few; the same for the same seed.

    Every combination starts from a pair that was not covered yet, so the loop ends.
    """
    chance = random.Random(seed)
    items = [[(name, number) for number in range(len(values))] for name, values in factors.items()]
    pairs = [pair for one, other in combinations(items, 2) for pair in product(one, other)]
    pairs.sort(key=lambda pair: sorted(f"{name}={factors[name][number]!r}" for name, number in pair))
    missing = dict.fromkeys(pairs)
    partners: dict[Item, set[Item]] = {item: set() for values in items for item in values}
    for one, other in pairs:
        partners[one].add(other)
        partners[other].add(one)
    chosen = []
    while missing:
        start = chance.choice(list(missing))
        candidates = [_fill(start, factors, partners, chance) for _ in range(CANDIDATES)]
        best = max(candidates, key=lambda case: sum(len(partners[item] & case) for item in case))
        for one, other in combinations(best, 2):
            partners[one].discard(other)
            partners[other].discard(one)
            missing.pop((one, other), None)
            missing.pop((other, one), None)
        numbers = dict(best)
        chosen.append({name: values[numbers[name]] for name, values in factors.items()})
    return chosen


def _fill(
    start: tuple[Item, Item], factors: Mapping[str, Sequence[Any]], partners: Mapping[Item, set[Item]],
    chance: random.Random,
) -> set[Item]:  # fmt: skip
    """Choose the other factors in a random order, each with the value that covers most missing pairs."""
    case, begun = set(start), dict(start)
    rest = [name for name in factors if name not in begun]
    chance.shuffle(rest)
    for name in rest:
        values = [(name, number) for number in range(len(factors[name]))]
        chance.shuffle(values)
        case.add(max(values, key=lambda item: len(partners[item] & case)))
    return case
