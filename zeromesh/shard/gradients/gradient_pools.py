"""Widths and pools of full gradients: one arithmetic, by which the engine allocates and the planner counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

Sizes = list[tuple[float, int]]
"""Bytes of a buffer, and the number of such buffers."""


class FullGradient(NamedTuple):
    """Bytes of what the reduction of a unit's gradient needs; ``number`` units are alike."""

    full: float  # the gradient of the whole unit, as it is summed
    adopted: bool  # it stays where autograd left it
    wire: float  # a copy in the dtype that is sent; 0 where that is the same
    receive: float  # other ranks' parts
    landing: float  # a sum on its way to the host; 0 where it stays on the device
    number: int = 1


def full_gradient(
    elements: tuple[float, float, float], widths: tuple[int, int, int], converts: bool, lands: bool, adopted: bool,
    number: int = 1,
) -> FullGradient:  # fmt: skip
    """Return the bytes of a gradient, of elements of the unit, of a shard and of parts that are received."""
    (full, shard, received), (width, wire, shard_width) = elements, widths  # the widths: whole, sent, and of sums
    return FullGradient(
        full * width,
        adopted,
        full * wire if converts else 0,
        received * wire,
        shard * shard_width if lands else 0,
        number,
    )


@dataclass(frozen=True)
class PoolRules:
    """Placement of gradients, as far as pools depend on it."""

    sharded: bool  # reduced after every micro-batch into a shard; else at the accumulation boundary
    owned: bool  # each rank ends up with its shard of the sum only
    accumulates: bool  # micro-batches are summed
    slots: int | None = None  # full gradients at a time; None: two if they are sharded, else all

    @property
    def narrow(self) -> bool:
        """True if full gradients are as narrow as what is sent, since nothing is added to them."""
        return self.owned and (self.sharded or not self.accumulates)

    def count(self, gradients: int) -> int:
        """Return the number of full gradients that exist at a time, of so many in all."""
        return self.slots or (2 if self.sharded else gradients)

    def limit(self, gradients: int) -> int:
        """Return the number of reductions under way at a time."""
        return max(1, min(2, self.count(gradients) - 1))


class GradientPools(NamedTuple):
    """Buffers of each pool, and of gradients that stay where autograd left them."""

    slots: Sizes
    adopted: Sizes
    wires: Sizes
    receives: Sizes
    landings: Sizes


def gradient_pools(gradients: Iterable[FullGradient], rules: PoolRules) -> GradientPools:
    """Return the buffers that are had at a time; in each pool the largest gradients fit at once."""
    members = [*gradients]
    number = sum(gradient.number for gradient in members)
    count, limit = rules.count(number), rules.limit(number)
    return GradientPools(
        slots=largest(((each.full, each.number) for each in members if not each.adopted), count),
        adopted=largest(
            ((each.full, each.number) for each in members if each.adopted), limit if rules.sharded else number
        ),
        # A sum that is sent to all ranks stays in its buffer while the next ones are made.
        wires=largest(((each.wire, each.number) for each in members), limit if rules.owned else limit + 1),
        receives=largest(((each.receive, each.number) for each in members), limit),
        landings=largest(((each.landing, each.number) for each in members), limit),
    )


def largest(sizes: Iterable[tuple[float, int]], count: int) -> Sizes:
    """Return the ``count`` largest of the buffers, those without bytes left out."""
    buffers = []
    for size, number in sorted(sizes, reverse=True):
        if count <= 0 or size <= 0:
            break
        buffers.append((size, min(number, count)))
        count -= number
    return buffers


def bytes_of(sizes: Sizes) -> float:
    """Return the bytes of all buffers."""
    return sum(size * number for size, number in sizes)
