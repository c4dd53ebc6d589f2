"""A small set of combinations in which every pair of values of two factors occurs."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

CANDIDATES = 20
"""Random orders in which the factors are filled, per combination; the one that covers most pairs is taken."""


def pairwise(factors: Mapping[str, Sequence[Any]], seed: int) -> list[dict[str, Any]]:
    """Combinations of one value per factor that cover all pairs, greedily few; the same for the same seed.

    Every combination starts from a pair that was not covered yet, so the loop ends.
    """
    chance = random.Random(seed)
    missing = {frozenset({(a, x), (b, y)}) for a, b in combinations(factors, 2) for x in factors[a] for y in factors[b]}
    chosen = []
    while missing:
        start = chance.choice(sorted(missing, key=sorted_pair))
        candidates = [_fill(dict(start), factors, missing, chance) for _ in range(CANDIDATES)]
        best = max(candidates, key=lambda case: len(_pairs(case) & missing))
        missing -= _pairs(best)
        chosen.append({factor: best[factor] for factor in factors})
    return chosen


def sorted_pair(pair: frozenset[tuple[str, Any]]) -> list[str]:
    return sorted(f"{factor}={value!r}" for factor, value in pair)


def _fill(
    case: dict[str, Any], factors: Mapping[str, Sequence[Any]], missing: set[Any], chance: random.Random
) -> dict[str, Any]:
    """Choose the other factors in a random order, each with the value that covers most missing pairs."""
    rest = [factor for factor in factors if factor not in case]
    chance.shuffle(rest)
    for factor in rest:
        values = list(factors[factor])
        chance.shuffle(values)
        case[factor] = max(
            values, key=lambda value: sum(frozenset({(factor, value), other}) in missing for other in case.items())
        )
    return case


def _pairs(case: Mapping[str, Any]) -> set[frozenset[tuple[str, Any]]]:
    return {frozenset(pair) for pair in combinations(case.items(), 2)}
