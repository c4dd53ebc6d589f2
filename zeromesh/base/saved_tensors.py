"""Plan of what becomes of the tensors that checkpointed blocks leave for their backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


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


@dataclass(frozen=True)
class SavedPlan:
    """Plans of all checkpointed modules, in their order."""

    blocks: tuple[BlockPlan, ...]
