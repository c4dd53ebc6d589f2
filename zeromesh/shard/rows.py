"""Layout of a flat buffer's master and optimizer states in one block of bytes, each a row of the master's dtype."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from zeromesh.kernels import halves
from zeromesh.kernels.update import Halves
from zeromesh.shard.flat import Flat
from zeromesh.shard.layout import round_up

RUN = 1 << 20  # elements that are joined or split at a time, which bounds the temporaries
ALIGN = 64  # bytes at a multiple of which a row begins


@dataclass(frozen=True)
class StateForm:
    """Contents of a block."""

    states: int = 0  # number of optimizer states of the parameter's shape, beside the master
    # The row of an fp32 master has only its lower halves: the upper ones are the bf16 parameters at rest, as in
    # `kernels/halves.py`. The kernel updates the halves in place; everybody else sees the master joined, in fp32.
    split: bool = False

    def of(self, flat: Flat, dtype: torch.dtype) -> StateForm:
        """Return the form of a flat buffer with a master of ``dtype``: only fp32 masters of bf16 parameters split."""
        return StateForm(self.states, self.split and dtype is torch.float32 and flat.layout.dtype is torch.bfloat16)


def _runs(elements: int) -> Iterator[slice]:
    for first in range(0, elements, RUN):
        yield slice(first, min(first + RUN, elements))


class Rows:
    """Places of the rows of one flat buffer in its block."""

    def __init__(self, flat: Flat, dtype: torch.dtype, form: StateForm) -> None:
        self.form = form = form.of(flat, dtype)
        self._flat = flat
        self._elements = elements = flat.own.stop - flat.own.start
        self._places: list[tuple[torch.dtype, int, int]] = []
        self.nbytes = 0
        for kind in (torch.int16 if form.split else dtype, *[dtype] * form.states):
            self._places.append((kind, self.nbytes, self.nbytes + elements * kind.itemsize))
            self.nbytes += round_up(elements * kind.itemsize, ALIGN)
        self.unpacked_bytes = elements * dtype.itemsize if form.split else 0

    def raw(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return the rows, 1-D, in their own dtypes: the master or its lower halves, then the states."""
        return [memory[start:stop].view(dtype) for dtype, start, stop in self._places]

    def unpack(self, memory: torch.Tensor, known: bool) -> list[torch.Tensor]:
        """Return the master and the states, 1-D, in the master's dtype."""
        first, *states = self.raw(memory)
        if not self.form.split:
            return [first, *states]
        master = torch.zeros(self._elements)
        # In runs, so that the temporaries of a conversion stay in the cache.
        for part in _runs(self._elements) if known else ():
            master[part] = halves.join(self._flat.shard[part], first[part])
        return [master, *states]

    def pack(self, memory: torch.Tensor, master: torch.Tensor) -> None:
        """Split a master that ``unpack`` joined; its upper halves become the parameters at rest."""
        lower = self.raw(memory)[0]
        for part in _runs(self._elements) if self.form.split else ():
            self._flat.shard[part], lower[part] = halves.split(master[part])

    def halves(self, memory: torch.Tensor, piece: int) -> Halves:
        """Return both halves of the master of the piece with this number."""
        local = self._flat.pieces[piece][1]
        return Halves(self._flat.shard[local], self.raw(memory)[0][local])
