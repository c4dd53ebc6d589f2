"""Windows of a flat buffer: the ranges whose master and optimizer states are in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from zeromesh.base.piece import Piece
from zeromesh.shard.parameters.flat import Flat


class StateWindow(NamedTuple):
    """Range of a flat buffer's elements whose master and states are in memory until the next window is asked for."""

    flat: Flat
    elements: slice  # in the flat buffer's master
    # The master and the states of these elements; None: all of them are where they rest. In an update, the lower halves
    # of a master that rests in halves.
    rows: Sequence[torch.Tensor] | None

    @property
    def is_last(self) -> bool:
        """Return whether the flat buffer ends here."""
        return bool(self.elements.stop == self.flat.master.numel())

    @property
    def master(self) -> torch.Tensor:
        """Return the master's elements, 1-D."""
        return self.flat.master[self.elements] if self.rows is None else self.rows[0]


def whole_window(flat: Flat) -> StateWindow:
    """Return all of a flat buffer whose master and states are where they rest."""
    return StateWindow(flat, slice(0, flat.master.numel()), None)


class PiecePart(NamedTuple):
    """Elements of a piece that are in a window."""

    number: int  # of the parameter
    elements: slice  # in the flat buffer's master
    within: slice  # in the window
    piece: Piece


def pieces_in(window: StateWindow) -> Iterator[PiecePart]:
    """Yield the parts of pieces in a window."""
    for index, local, piece in window.flat.pieces:
        start, stop = max(local.start, window.elements.start), min(local.stop, window.elements.stop)
        if start < stop:
            begin = window.elements.start
            yield PiecePart(index, slice(start, stop), slice(start - begin, stop - begin), piece)
