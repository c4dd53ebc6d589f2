"""Placement of each state of a unit: the table whose rows are ZeRO's stages.

A unit has three states: its parameters, their gradients, and the optimizer's state (fp32 master,
moments). Each has a placement over the data-parallel ranks and a tier of memory. What has to be
communicated follows from neighbouring cells; no code outside ``config/`` knows a ZeRO stage.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace


class Placement(enum.Enum):
    """Distribution of a state over the ranks of the shard group."""

    REPLICATED = "replicated"
    SHARDED = "sharded"


class Tier(enum.Enum):
    """The memory in which a state rests."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


@dataclass(frozen=True)
class PlacementRow:
    """One row of the placement table.

    Attributes:
        parameter, gradient, optimizer: where each state lies over the ranks.
        parameter_tier, optimizer_tier: where they rest.
        gradient_tier: where the sum rests; a full gradient is on the device until it is reduced.
        offloaded: share of the model of which gradients and optimizer state are on their tiers, in whole units; those
            of the others are on the device.
        pinned: whether host memory is page-locked.
        split: whether masters that rest off the device, as their bf16 parameters do, are halves of which one is these.

    Raises:
        ValueError: if a state is sharded while one that must be at least as sharded is not
            (parameter sharded => gradient sharded => optimizer sharded), or rests off the device and is not sharded.
    """

    parameter: Placement
    gradient: Placement
    optimizer: Placement
    parameter_tier: Tier = Tier.DEVICE
    gradient_tier: Tier = Tier.DEVICE
    optimizer_tier: Tier = Tier.DEVICE
    offloaded: float = 1.0
    pinned: bool = True
    split: bool = False

    @property
    def on_device(self) -> PlacementRow:
        """The same with gradients and optimizer state on the device."""
        return replace(self, gradient_tier=Tier.DEVICE, optimizer_tier=Tier.DEVICE)

    def __post_init__(self) -> None:
        order = [self.parameter, self.gradient, self.optimizer]
        sharded = [placement is Placement.SHARDED for placement in order]
        if sharded != sorted(sharded):
            raise ValueError(
                f"placement parameter={self.parameter.value}, gradient={self.gradient.value}, "
                f"optimizer={self.optimizer.value}: a sharded parameter needs a sharded gradient, and a sharded "
                "gradient a sharded optimizer; use one of the rows in zeromesh.model.placement.ROWS"
            )
        for state, placement, tier in (
            ("parameter", self.parameter, self.parameter_tier),
            ("gradient", self.optimizer, self.gradient_tier),
            ("optimizer", self.optimizer, self.optimizer_tier),
        ):
            if tier is not Tier.DEVICE and placement is Placement.REPLICATED:
                raise ValueError(
                    f"{state} is to rest on tier {tier.value}, but is replicated: every rank would keep a copy of its "
                    "own; use a row in which it is sharded"
                )


_REPLICATED, _SHARDED = Placement.REPLICATED, Placement.SHARDED

ROWS: dict[int, PlacementRow] = {
    0: PlacementRow(_REPLICATED, _REPLICATED, _REPLICATED),
    1: PlacementRow(_REPLICATED, _REPLICATED, _SHARDED),
    2: PlacementRow(_REPLICATED, _SHARDED, _SHARDED),
    3: PlacementRow(_SHARDED, _SHARDED, _SHARDED),
}
"""The rows by their ZeRO number, tiers on the device."""
