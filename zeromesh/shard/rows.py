"""How a flat buffer's master and states lie in one block of bytes: as they are, or in fewer.

As they are, each is a row of the master's dtype. Two options take less, where the master is in fp32:

- ``eight``: a state is a row of 8-bit codes, and one of scales, as in ``zeromesh.kernels.eight``, for each piece.
- ``split``: of a bf16 parameter's master only the lower half is here, and the upper one is the parameter itself, in its
  home, as in ``zeromesh.kernels.halves``.

The kernel updates them so. Whoever else looks at them has them unpacked, in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from zeromesh.kernels import eight, halves
from zeromesh.kernels.update import Packed
from zeromesh.shard.layout import round_up
from zeromesh.shard.unit import Flat

RUN = 1 << 20
"""Elements that are coded at a time, which takes much memory for each: a whole number of blocks."""

ALIGN = 64
"""Bytes at a multiple of which a row begins."""

Roots = Callable[[int], Sequence[bool]]
"""Of the piece of a flat buffer with this number: for each state whether its root is kept, as ``eight.rooted``."""


@dataclass(frozen=True)
class Form:
    """What is kept, and how.

    Attributes:
        states: like the parameter, beside the master, that the optimizer has.
        eight: whether states are in 8 bits.
        split: whether masters are in halves.
    """

    states: int = 0
    eight: bool = False
    split: bool = False

    def of(self, flat: Flat, dtype: torch.dtype) -> Form:
        """What of it a flat buffer with a master of this dtype has."""
        wide = dtype is torch.float32
        split = self.split and wide and flat.layout.dtype is torch.bfloat16
        return Form(self.states, self.eight and wide and not _shares_blocks(flat), split)

    @property
    def is_packed(self) -> bool:
        """Whether anything takes fewer bytes."""
        return self.eight or self.split


def _shares_blocks(flat: Flat) -> bool:
    """Whether ranks along the tensor axis have the same elements beside others, which would have other scales there."""
    own, shared = flat.own, {} if flat.gradient is None else flat.gradient.shared
    pieces = {(start - own.start, stop - own.start) for _, start, stop in flat.layout.owned(own.start, own.stop)}
    return any((start, stop) not in pieces for ranges in shared.values() for start, stop, _ in ranges)


def _runs(start: int, stop: int) -> Iterator[slice]:
    for first in range(start, stop, RUN):
        yield slice(first, min(first + RUN, stop))


class Rows:
    """Where they lie, of one flat buffer.

    Args:
        flat: whose.
        dtype: of its master.
        form: what is kept, if the flat buffer can have it.

    Attributes:
        form: what it has of it.
        nbytes: of all rows.
        unpacked_bytes: of what is made to look at them.
    """

    def __init__(self, flat: Flat, dtype: torch.dtype, form: Form) -> None:
        self.form = form = form.of(flat, dtype)
        self._flat, self._dtype = flat, dtype
        self._elements = elements = flat.own.stop - flat.own.start
        pieces = [stop - start for _, start, stop in flat.layout.owned(flat.own.start, flat.own.stop)]
        firsts = [sum(map(eight.scales_of, pieces[:number])) for number in range(len(pieces) + 1)]
        self._scales = [slice(*pair) for pair in pairwise(firsts)]
        kinds = [(torch.int16 if form.split else dtype, elements)]
        kinds += [(torch.uint8 if form.eight else dtype, elements)] * form.states
        kinds += [(torch.float32, firsts[-1])] * (form.states if form.eight else 0)
        self._places: list[tuple[torch.dtype, int, int]] = []
        self.nbytes = 0
        for kind, count in kinds:
            self._places.append((kind, self.nbytes, self.nbytes + count * kind.itemsize))
            self.nbytes += round_up(count * kind.itemsize, ALIGN)
        self.unpacked_bytes = elements * dtype.itemsize * (form.split + form.states * form.eight)

    def raw(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """The rows, 1-D, in their own dtypes: the master or its half, the states or their codes, and scales."""
        return [memory[start:stop].view(dtype) for dtype, start, stop in self._places]

    def unpack(self, memory: torch.Tensor, roots: Roots, known: bool) -> list[torch.Tensor]:
        """The master and the states, 1-D, in the master's dtype; views of what is kept so, and new where it is not.

        What is new is zeros if what the block holds is not ``known``.
        """
        raw, found = self.raw(memory), []
        for number, row in enumerate(raw[: 1 + self.form.states]):
            if row.dtype is self._dtype:
                found.append(row)
                continue
            value = torch.zeros(self._elements, dtype=self._dtype)
            for part in _runs(0, self._elements) if number == 0 and known else ():
                value[part] = halves.join(self._flat.home[part], row[part])
            for piece, (_, local, _) in enumerate(self._flat.pieces if number and known else ()):
                for part in _runs(local.start, local.stop):
                    value[part] = self._decoded(raw, piece, part, number, roots(piece))
            found.append(value)
        return found

    def pack(self, memory: torch.Tensor, values: Sequence[torch.Tensor], roots: Roots, anew: bool = False) -> None:
        """Take what ``unpack`` gave, and others have changed; the upper half of a master goes to its home.

        What was not changed keeps its codes, unless they are to be made ``anew``: the same of the same values.
        """
        raw = self.raw(memory)
        for part in _runs(0, self._elements) if self.form.split else ():
            self._flat.home[part], raw[0][part] = halves.split(values[0][part])
        for number in range(1, 1 + self.form.states) if self.form.eight else ():
            for piece, (_, local, _) in enumerate(self._flat.pieces):
                kinds = roots(piece)
                if number > len(kinds):
                    continue
                for part in _runs(local.start, local.stop):
                    value = values[number][part]
                    if anew or not torch.equal(value, self._decoded(raw, piece, part, number, kinds)):
                        first, scales = part.start - local.start, self._scales_of(raw, piece, part, number)
                        raw[number][part], scales[:] = eight.encode(value, kinds[number - 1], 1, first)

    def _decoded(
        self, raw: Sequence[torch.Tensor], piece: int, part: slice, number: int, kinds: Sequence[bool]
    ) -> torch.Tensor:  # fmt: skip
        """A part of a piece's state, which begins with a block; zeros where the optimizer has none."""
        if number > len(kinds):
            return torch.zeros(part.stop - part.start)
        return eight.decode(raw[number][part], self._scales_of(raw, piece, part, number), kinds[number - 1])

    def _scales_of(self, raw: Sequence[torch.Tensor], piece: int, part: slice, number: int) -> torch.Tensor:
        """Of a part of a piece's state, which begins with a block."""
        of_piece = raw[self.form.states + number][self._scales[piece]]
        first = eight.scales_of(part.start - self._flat.pieces[piece][1].start)
        return of_piece[first : first + eight.scales_of(part.stop - part.start)]

    def packed(self, memory: torch.Tensor, piece: int, states: int) -> Packed:
        """What the kernel updates of the piece with this number, of which the optimizer has so many states."""
        raw, (_, local, _) = self.raw(memory), self._flat.pieces[piece]
        upper = self._flat.home[local] if self.form.split else None
        lower = raw[0][local] if self.form.split else None
        if not self.form.eight:
            return Packed(upper, lower)
        codes = tuple(row[local] for row in raw[1 : 1 + states])
        first = 1 + self.form.states
        return Packed(upper, lower, codes, tuple(row[self._scales[piece]] for row in raw[first : first + states]))
