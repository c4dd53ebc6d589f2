"""Split of a parameter along one dim over the ranks of the tensor or the expert axis. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Interval = tuple[int, int]


@dataclass(frozen=True)
class Split:
    """Cut of one parameter. Ranks with the same intervals hold copies."""

    dim: int
    size: int  # of the whole dim
    # Of the dim on each rank that has an interval; what the intervals do not fill, at the end, is padding.
    length: int
    # By rank, ranges of the whole dim in the order in which the rank has them: two of a fused gate-up weight, three of
    # a fused qkv weight, one of most others.
    intervals: tuple[tuple[Interval, ...], ...]

    @classmethod
    def even(cls, dim: int, sections: Sequence[int], ranks: int, block: int = 1) -> Split:
        """Cut each of several sections of the dim, such as q, k and v, on its own into equal parts.

        ``block`` entries, such as the width of a head, stay together. Raises ValueError for a section that the ranks do
        not divide, with the arithmetic and what would work.
        """
        parts: list[list[Interval]] = [[] for _ in range(ranks)]
        begin = 0
        for section in sections:
            blocks, rest = divmod(section, block)
            if rest:
                raise ValueError(f"{section} entries are not a whole number of blocks of {block}")
            if blocks % ranks and ranks % blocks:
                raise ValueError(_indivisible(section, blocks, block, ranks))
            # With fewer blocks than ranks, neighbouring ranks share one, as heads of keys and
            # values (Shazeer, "Fast Transformer Decoding", 2019; Ainslie et al., "GQA", 2023).
            for rank in range(ranks):
                each = max(1, blocks // ranks)
                first = rank * blocks // ranks
                parts[rank].append((begin + first * block, begin + (first + each) * block))
            begin += section
        length = sum(stop - start for start, stop in parts[0])
        return cls(dim, begin, length, tuple(tuple(part) for part in parts))

    @classmethod
    def padded(cls, dim: int, size: int, ranks: int) -> Split:
        """Cut into equal lengths, of which the last ranks may fill less, or nothing: a vocabulary of any size."""
        length = -(-size // ranks)
        starts = [min(rank * length, size) for rank in range(ranks)]
        return cls(dim, size, length, tuple(((start, min(start + length, size)),) for start in starts))

    @classmethod
    def on(cls, dim: int, size: int, ranks: int, owner: int) -> Split:
        """Leave all of the dim to one rank, and nothing, without padding, to the others: one expert of a list."""
        return cls(dim, size, size, tuple(((0, size),) if rank == owner else () for rank in range(ranks)))

    @property
    def ranks(self) -> int:
        """Number of ranks along the axis."""
        return len(self.intervals)

    @property
    def owner(self) -> int | None:
        """The only rank that has any of it; None if several have."""
        owners = [rank for rank, part in enumerate(self.intervals) if part]
        return owners[0] if len(owners) == 1 < self.ranks else None

    def holders(self, start: int, stop: int) -> list[int]:
        """Return the ranks that have the interval ``[start, stop)``, in order; the first of them owns it."""
        return [rank for rank, part in enumerate(self.intervals) if (start, stop) in part]

    def shape(self, whole_shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's part of a parameter."""
        length = self.length if self.intervals[rank] else 0
        return (*whole_shape[: self.dim], length, *whole_shape[self.dim + 1 :])

    def boxes(self, rank: int) -> list[tuple[int, int, int]]:
        """Return a rank's entries of the dim: (start in its own part, start in the whole, count)."""
        entries, place = [], 0
        for start, stop in self.intervals[rank]:
            if start < stop:
                entries.append((place, start, stop - start))
            place += stop - start
        return entries

    def take(self, parameter: Tensor, rank: int) -> Tensor:
        """Return a rank's part of a whole parameter."""
        part = parameter.new_zeros(self.shape(parameter.shape, rank))  # padding is zero
        for at, start, count in self.boxes(rank):
            part.narrow(self.dim, at, count).copy_(parameter.narrow(self.dim, start, count))
        return part


READ = 1 << 22  # elements of a whole parameter that are read at a time where this rank keeps a part of each row


@dataclass(frozen=True)
class Held:
    """Part of one parameter that this rank holds along an axis."""

    whole: tuple[int, ...]  # shape of the whole parameter
    split: Split | None = None  # None where all ranks hold all of it
    rank: int = 0  # this one, along the axis
    ranks: int = 1
    # Whether ranks use what all of them hold in different ways, and each has a share of its gradient: as of a norm on
    # their own heads, or on parts of the sequence. Of a split parameter this is always so where several hold the same.
    partial: bool = False
    axis: str = "tensor"  # group of the mesh whose ranks hold the other parts

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part on this rank."""
        return self.whole if self.split is None else self.split.shape(self.whole, self.rank)

    def cut(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor of the parameter's shape."""
        return tensor if self.split is None else self.split.take(tensor, self.rank)

    def place(self, part: Tensor, tensor: Tensor) -> None:
        """Write what is here to where it belongs in a whole tensor."""
        if self.split is None:
            tensor.copy_(part)
            return
        for at, start, count in self.split.boxes(self.rank):
            tensor.narrow(self.split.dim, start, count).copy_(part.narrow(self.split.dim, at, count))

    def boxes(self, start: int, stop: int) -> Iterator[HeldBox]:
        """Yield boxes of the whole, and what of them lies in elements ``[start, stop)`` of what is here, flattened."""
        if self.split is None:
            if start < stop:
                sharers, offsets = self.ranks if self.partial else 1, (0,) * len(self.whole)
                yield HeldBox(offsets, self.whole, start, stop, ((start, stop),), self.rank == 0, sharers)
            return
        dim, shape = self.split.dim, self.shape
        rows, width = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
        for at, begin, count in self.split.boxes(self.rank):
            offsets = tuple(begin if axis == dim else 0 for axis in range(len(shape)))
            sizes = tuple(count if axis == dim else size for axis, size in enumerate(shape))
            # Rows of the box that lie one after the other in what is here.
            together, steps = (rows, 1) if count == shape[dim] else (1, rows)
            length, stride = together * count * width, shape[dim] * width
            pieces = []
            for row in range(steps):
                place = row * stride + at * width
                low, high = max(start, place), min(stop, place + length)
                if low < high:
                    pieces.append((low, high, row * length + low - place))
            if pieces:
                first, elements = pieces[0][2], sum(high - low for low, high, _ in pieces)
                runs = tuple((low, high) for low, high, _ in pieces)
                holders = self.split.holders(begin, begin + count)
                yield HeldBox(offsets, sizes, first, first + elements, runs, holders[0] == self.rank, len(holders))

    def read(self, source: Callable[[int, int], Tensor], start: int, stop: int) -> Tensor:
        """Return elements ``[start, stop)`` of what is here, flattened; ``source`` reads ranges of the whole."""
        if self.split is None:
            return source(start, stop)
        dim, shape = self.split.dim, self.shape
        elements = None
        if dim == 0:
            width = math.prod(shape[1:])
            for at, begin, count in self.split.boxes(self.rank):
                low, high, shift = max(start, at * width), min(stop, (at + count) * width), (begin - at) * width
                if low < high:
                    value = source(low + shift, high + shift)
                    elements = value.new_zeros(stop - start) if elements is None else elements
                    elements[low - start : high - start] = value
            return source(0, 0).new_zeros(stop - start) if elements is None else elements
        # Where rows are cut, whole rows are read, some at a time: a read for each piece of a row would take far longer.
        width, whole_width = math.prod(shape[dim:]), math.prod(self.whole[dim:])
        row = Split(1, self.split.size, self.split.length, self.split.intervals)
        first, last, step = start // width, -(-stop // width), max(1, READ // whole_width)
        parts = []
        for number in range(first, last, step):
            rows = min(step, last - number)
            block = source(number * whole_width, (number + rows) * whole_width)
            parts.append(row.take(block.view(rows, *self.whole[dim:]), self.rank).reshape(-1))
        return torch.cat(parts)[start - first * width : stop - first * width]


@dataclass(frozen=True)
class HeldBox:
    """A part of a box of a whole parameter that a rank holds."""

    offsets: tuple[int, ...]  # of the box in the whole, by dim
    sizes: tuple[int, ...]
    start: int  # the range of the flattened box
    stop: int
    runs: tuple[tuple[int, int], ...]  # where these elements lie in what the rank holds, flattened, in order
    owned: bool  # the first of those that hold them: what is counted or written once, it is here
    sharers: int  # so many neighbouring ranks have shares of these elements' gradient, which are to be summed


def _indivisible(section: int, blocks: int, block: int, ranks: int) -> str:
    """Return the problem, and the numbers of ranks and blocks that would do."""
    sizes = [size for size in range(1, 2 * max(blocks, ranks) + 1) if blocks % size == 0 or size % blocks == 0]
    below = max((size for size in sizes if size < ranks), default=1)
    above = min((size for size in sizes if size > ranks), default=blocks)
    near = f"{below} or {above}" if below != above else str(below)
    what = f"{section} = {blocks} blocks of {block} entries" if block > 1 else f"{blocks} entries"
    fewer, more = blocks // ranks * ranks, (blocks // ranks + 1) * ranks
    counts = f"{fewer} or {more}" if fewer else str(more)
    return (
        f"{what} cannot be split over {ranks} ranks: {blocks} / {ranks} = {blocks / ranks:.4g}; "
        f"with these, tensor sizes near it that work are {near}; on {ranks} ranks, the counts {counts}"
    )
