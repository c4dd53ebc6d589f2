"""How a parameter is cut along one dim over the ranks of the tensor axis: declared once, all else follows from it.

Pure arithmetic. A rank has one or more intervals of the whole dim, one after the other: two of a fused gate-up weight,
three of a fused qkv weight, one of most others. Ranks with the same intervals hold copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

Interval = tuple[int, int]


@dataclass(frozen=True)
class Split:
    """One parameter's.

    Attributes:
        dim: which dim is cut.
        size: of the whole dim.
        length: of the dim on each rank; what its intervals do not fill, at the end, is padding.
        intervals: by rank, ranges ``[start, stop)`` of the whole dim, in the order in which the rank has them.
    """

    dim: int
    size: int
    length: int
    intervals: tuple[tuple[Interval, ...], ...]

    @classmethod
    def even(cls, dim: int, sections: Sequence[int], ranks: int, block: int = 1) -> Split:
        """Each of several sections of the dim, such as q, k and v, is cut on its own into equal parts.

        Args:
            dim: which one.
            sections: lengths of the sections, in order; one for a weight that is not fused.
            ranks: of the tensor axis.
            block: entries that stay together, such as the width of a head. A section with fewer blocks than ranks, but
                by a whole factor, is held in copies: neighbouring ranks share a block, as heads of keys and values do
                (Shazeer, "Fast Transformer Decoding", 2019; Ainslie et al., "GQA", 2023).

        Raises:
            ValueError: a section that the ranks do not divide, with the arithmetic and what would work.
        """
        parts: list[list[Interval]] = [[] for _ in range(ranks)]
        begin = 0
        for section in sections:
            blocks, rest = divmod(section, block)
            if rest:
                raise ValueError(f"{section} entries are no whole number of blocks of {block}")
            if blocks % ranks and ranks % blocks:
                raise ValueError(_indivisible(section, blocks, block, ranks))
            for rank in range(ranks):
                each = max(1, blocks // ranks)
                first = rank * blocks // ranks
                parts[rank].append((begin + first * block, begin + (first + each) * block))
            begin += section
        length = sum(stop - start for start, stop in parts[0])
        return cls(dim, begin, length, tuple(tuple(part) for part in parts))

    @classmethod
    def padded(cls, dim: int, size: int, ranks: int) -> Split:
        """Equal lengths, of which the last ranks may fill less, or nothing: a vocabulary of any size."""
        length = -(-size // ranks)
        starts = [min(rank * length, size) for rank in range(ranks)]
        return cls(dim, size, length, tuple(((start, min(start + length, size)),) for start in starts))

    @property
    def ranks(self) -> int:
        """Of the tensor axis."""
        return len(self.intervals)

    def holders(self, rank: int) -> list[int]:
        """The ranks that have what this one has, itself among them, in order; the first of them owns it."""
        return [other for other, part in enumerate(self.intervals) if part == self.intervals[rank]]

    def owns(self, rank: int) -> bool:
        """Whether this rank is the first of those that have the same: what is counted or written once, it is here."""
        return self.holders(rank)[0] == rank

    @cached_property
    def copies(self) -> int:
        """How many ranks have the same."""
        return len(self.holders(0))

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """That of a rank's part of a parameter."""
        return (*whole[: self.dim], self.length, *whole[self.dim + 1 :])

    def boxes(self, rank: int) -> list[tuple[int, int, int]]:
        """Where a rank's entries of the dim lie: (in its own part, in the whole, how many)."""
        found, place = [], 0
        for start, stop in self.intervals[rank]:
            if start < stop:
                found.append((place, start, stop - start))
            place += stop - start
        return found

    def take(self, whole: Tensor, rank: int) -> Tensor:
        """A rank's part of a whole parameter; padding is zero."""
        part = whole.new_zeros(self.shape(whole.shape))
        for at, start, count in self.boxes(rank):
            part.narrow(self.dim, at, count).copy_(whole.narrow(self.dim, start, count))
        return part

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole parameter from the parts of all ranks."""
        shape = list(parts[0].shape)
        shape[self.dim] = self.size
        whole = torch.empty(shape, dtype=parts[0].dtype, device=parts[0].device)
        for rank, part in enumerate(parts):
            for at, start, count in self.boxes(rank):
                whole.narrow(self.dim, start, count).copy_(part.narrow(self.dim, at, count))
        return whole


def _indivisible(section: int, blocks: int, block: int, ranks: int) -> str:
    """What is wrong, and which numbers of ranks and blocks would do."""
    sizes = [size for size in range(1, 2 * max(blocks, ranks) + 1) if blocks % size == 0 or size % blocks == 0]
    below = max((size for size in sizes if size < ranks), default=1)
    above = min((size for size in sizes if size > ranks), default=blocks)
    near = f"{below} or {above}" if below != above else str(below)
    what = f"{blocks} blocks of {block} entries" if block > 1 else f"{blocks} entries"
    fewer, more = blocks // ranks * ranks, (blocks // ranks + 1) * ranks
    counts = f"{fewer} or {more}" if fewer else str(more)
    return (
        f"{section} = {what} cannot be split over {ranks} ranks: {blocks} / {ranks} = {blocks / ranks:.4g}; "
        f"with these, tensor sizes near it that work are {near}; on {ranks} ranks, the counts {counts}"
    )
