"""Piece of a parameter that this rank updates, as an optimizer sees it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from zeromesh.base.split import Held


@dataclass(frozen=True)
class Piece:
    """The elements ``[start, stop)`` of what this rank holds of one parameter, flattened, which it updates."""

    name: str
    held: Held
    start: int
    stop: int
    # Shape (stop - start,), in the master dtype. Its ``grad`` is set before each update, and is None in a step in which
    # no rank had a gradient for it, as torch has it.
    parameter: torch.nn.Parameter
    by_row: bool = False  # whole rows of a matrix, of which the optimizer may have states of one number per row

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return self.held.whole

    @property
    def whole(self) -> bool:
        """True if this rank holds all of the parameter."""
        return self.held.split is None and self.start == 0 and self.stop == torch.Size(self.shape).numel()

    def set_gradient(self, gradient: torch.Tensor | None) -> None:
        """Set the gradient for the optimizer's step."""
        self.parameter.grad = gradient

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this piece of a tensor of the shape of the whole parameter, or of what this rank holds of it: 1-D."""
        part = tensor if tuple(tensor.shape) == self.held.shape else self.held.cut(tensor)
        return part.reshape(-1)[self.start : self.stop]

    def owned(self, values: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the parts of this piece's ``values`` that count here; other ranks may hold copies."""
        flat = values.reshape(-1)
        for box in self.held.boxes(self.start, self.stop):
            if box.owned:
                yield from (flat[low - self.start : high - self.start] for low, high in box.runs)


class PieceExchange(Protocol):
    """Exchange between ranks for optimizers that need more than their own elements. All make the same calls."""

    def sum(self, vector: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``vector`` over the ranks that hold the other pieces."""

    @property
    def buckets(self) -> Sequence[Sequence[str]]:
        """Names of the parameters that travel together, bucket by bucket; the same on every rank."""

    def gather(
        self, bucket: int, pieces: Mapping[str, torch.Tensor], parts: Collection[str] = ()
    ) -> dict[str, torch.Tensor]:
        """Return whole tensors of the bucket's parameters, from one piece each by name, until the next call.

        Of the parameters ``parts``, what this rank holds suffices where they are split along an axis.
        """
