"""Where each state of a unit rests: the one table that all that ZeRO names are rows of.

A unit has three states: its parameters, their gradients, and the optimizer's state (fp32 master,
moments). Each has a placement over the data-parallel ranks and a tier of memory. What has to be
communicated follows from neighbouring cells; no code outside ``config/`` knows a ZeRO stage.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Placement(enum.Enum):
    """How a state lies over the ranks of the shard group."""

    REPLICATED = "replicated"
    SHARDED = "sharded"


class Tier(enum.Enum):
    """The memory in which a state rests."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


@dataclass(frozen=True)
class Row:
    """One row of the placement table.

    Raises:
        ValueError: if a state is sharded while one that must be at least as sharded is not
            (parameter sharded => gradient sharded => optimizer sharded).
    """

    parameter: Placement
    gradient: Placement
    optimizer: Placement
    parameter_tier: Tier = Tier.DEVICE
    gradient_tier: Tier = Tier.DEVICE
    optimizer_tier: Tier = Tier.DEVICE

    def __post_init__(self) -> None:
        order = [self.parameter, self.gradient, self.optimizer]
        sharded = [placement is Placement.SHARDED for placement in order]
        if sharded != sorted(sharded):
            raise ValueError(
                f"placement parameter={self.parameter.value}, gradient={self.gradient.value}, "
                f"optimizer={self.optimizer.value}: a sharded parameter needs a sharded gradient, and a sharded "
                "gradient a sharded optimizer; use one of the rows in zeromesh.model.placement.ROWS"
            )


_REPLICATED, _SHARDED = Placement.REPLICATED, Placement.SHARDED

ROWS: dict[int, Row] = {
    0: Row(_REPLICATED, _REPLICATED, _REPLICATED),
    1: Row(_REPLICATED, _REPLICATED, _SHARDED),
    2: Row(_REPLICATED, _SHARDED, _SHARDED),
    3: Row(_SHARDED, _SHARDED, _SHARDED),
}
"""The rows by their ZeRO number, tiers on the device."""
