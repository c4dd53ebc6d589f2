"""What an optimizer sees of a parameter: the piece of it that this rank updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class Piece:
    """The elements ``[start, stop)`` of one flattened parameter, which this rank updates.

    Attributes:
        name: fully qualified name of the parameter in the model.
        shape: global shape of the whole parameter.
        start, stop: the range of the flattened parameter that ``parameter`` holds.
        parameter: shape ``(stop - start,)``, in the master dtype; its ``grad`` is set before each update, and is
            None in a step in which no rank had a gradient for the parameter.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    parameter: torch.nn.Parameter

    @property
    def whole(self) -> bool:
        """Whether this rank holds all of the parameter."""
        return self.start == 0 and self.stop == torch.Size(self.shape).numel()


class PieceExchange(Protocol):
    """What an optimizer that needs more than its own elements may ask of the other ranks.

    Every rank must make the same calls in the same order.
    """

    def sum(self, vector: torch.Tensor) -> torch.Tensor:
        """The sum of ``vector`` over the ranks that hold the other pieces. One shape on all ranks."""

    @property
    def buckets(self) -> Sequence[Sequence[str]]:
        """Names of the parameters that travel together, bucket by bucket; the same on every rank."""

    def gather(self, bucket: int, pieces: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Whole flattened tensors of the bucket's parameters from one piece each (absent or missing: zeros).

        ``pieces`` maps a name to this rank's ``stop - start`` elements. What comes back is valid until the next call.
        """
