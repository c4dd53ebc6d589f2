"""Medians of all other ranks, for each rank."""

from __future__ import annotations

from collections.abc import Sequence


def medians_of_others(values: Sequence[float]) -> list[float]:
    """Return for each value the median of all others, from one sorting; 0 where there is no other."""
    count = len(values)
    if count < 2:
        return [0.0] * count
    order = sorted(range(count), key=values.__getitem__)
    medians = [0.0] * count
    # Without the value at a place, those behind it move up by one.
    low, high = (count - 2) // 2, (count - 1) // 2
    for place, index in enumerate(order):
        below = values[order[low + (place <= low)]]
        medians[index] = below if low == high else (below + values[order[high + (place <= high)]]) / 2
    return medians
