"""Plan of what becomes of the tensors that checkpointed blocks leave for their backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Saved(Enum):
    """Fate of one result."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    MOVE = "move"


@dataclass(frozen=True)
class BlockPlan:
    """Plan of what one checkpointed block leaves for its backward."""

    inputs: Saved = Saved.KEEP  # KEEP or MOVE
    # By operator, as "aten::mm", and the number of its calls in the block's forward before; others are recomputed.
    results: Mapping[tuple[str, int], Saved] = field(default_factory=dict)
    keeps_all: bool = False  # no checkpoint at all
    keeps: Callable[[Any], bool] | None = None  # of an operator of torch's: whether all of its results are kept

    def fate(self, operator: Any, number: int) -> Saved:
        """Return what becomes of the result of an operator that was called so many times before."""
        if self.keeps is not None and self.keeps(operator):
            return Saved.KEEP
        return self.results.get((operator._schema.name, number), Saved.RECOMPUTE)

    @property
    def moves(self) -> bool:
        """True if a tensor is moved off the device."""
        return Saved.MOVE in (self.inputs, *self.results.values())
