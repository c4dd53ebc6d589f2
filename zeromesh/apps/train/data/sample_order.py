"""Orders as pure functions of a seed: permutations, rows of whole records, and blends."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ROUNDS = 6  # of the permutation; four already look random (Luby and Rackoff, 1988)


def seed_of(*numbers: int) -> int:
    """Return 64 bits that depend on all numbers and are the same on every machine."""
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


# A generator of numpy would be simpler, but its numbers may change with its version, and with them a resumed run.
def hashed(values: NDArray[np.integer], seed: int) -> NDArray[np.uint64]:
    """Return 64 bits for each value, by the finalizer of splitmix64 (Steele et al., 2014)."""
    x = values.astype(np.uint64) + np.uint64(seed) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed


@dataclass(frozen=True)
class Permutation:
    """A pseudo-random permutation of ``range(size)``, whose entries can be computed one by one."""

    size: int
    seed: int

    def __getitem__(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the entries at these places, int64, in ``range(size)``."""
        # Outside the range, the walk back into it might never end.
        assert len(places) == 0 or 0 <= places.min() <= places.max() < self.size
        # A Feistel network permutes the smallest power of four that holds the range. An entry outside is permuted again
        # until it is inside (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
        half = ((self.size - 1).bit_length() + 1) // 2
        entries = self._scramble(places.astype(np.uint64), half)
        while len(outside := np.flatnonzero(entries >= self.size)):
            entries[outside] = self._scramble(entries[outside], half)
        return entries.astype(np.int64)

    def _scramble(self, values: NDArray[np.uint64], half: int) -> NDArray[np.uint64]:
        shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
        left, right = values >> shift, values & mask
        for number in range(ROUNDS):
            left, right = right, left ^ (hashed(right, seed_of(self.seed, number)) & mask)
        return left << shift | right


def pack(sizes: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """Return the row of each thing of ``sizes``, by best-fit decreasing: each into the fullest row that holds it."""
    rows = np.empty(len(sizes), dtype=np.int64)
    with_space: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64)] * (capacity + 1)
    any_with = np.zeros(capacity + 1, dtype=bool)
    count = 0

    def put(space: int, numbers: NDArray[np.int64]) -> None:
        with_space[space] = numbers
        any_with[space] = len(numbers) > 0

    # Things of one size are placed together, one into each of the fullest rows that hold them: a loop over sizes is
    # short.
    order = np.argsort(-sizes, kind="stable")
    present, firsts = np.unique(-sizes[order], return_index=True)
    for size, things in zip(-present, np.split(order, firsts[1:]), strict=True) if len(sizes) else ():
        while len(things):
            space = int(size + any_with[size:].argmax())
            if not any_with[space]:
                opened = -(-len(things) // (capacity // int(size)))
                space = capacity
                put(space, np.arange(count, count + opened))
                count += opened
            free = with_space[space]
            used = free[: len(things)]
            rows[things[: len(used)]] = used
            things = things[len(used) :]
            put(space, free[len(used) :])
            left = space - int(size)
            put(left, np.concatenate([with_space[left], used]))
    return rows


class Blend:
    """Choice of the part of a blend for each sample ``i``: that with the largest ``weight * max(i, 1) - taken``."""

    def __init__(self, weights: Sequence[float], consumed: int) -> None:
        self.weights = weights
        self.step = 0
        self.taken = [0] * len(weights)
        if len(weights) == 1:
            self.step, self.taken = consumed, [consumed]
            return
        # A resumed run counts from the beginning, a second for some million samples, and reads none of them.
        for start in range(0, consumed, 2**16):
            self.take(min(2**16, consumed - start))

    def take(self, count: int) -> list[tuple[int, int]]:
        """Return, for each of the next samples, its part and the number of samples taken from the part before."""
        taken, chosen = self.taken, []
        for step in range(self.step, self.step + count):
            position = max(step, 1)
            behind = [weight * position - number for weight, number in zip(self.weights, taken, strict=True)]
            part = behind.index(max(behind))  # ties go to the first part
            chosen.append((part, taken[part]))
            taken[part] += 1
        self.step += count
        return chosen
