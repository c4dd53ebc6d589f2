"""Placement of each state of a unit: the table whose rows are ZeRO's stages.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace


class Placement(enum.Enum):
    """Distribution of a state over the ranks of the shard group."""

    REPLICATED = "replicated"
    SHARDED = "sharded"


class Tier(enum.Enum):
    """Memory in which a state rests."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"

    @property
    def in_blocks(self) -> bool:
        """True if states are in memory only while they are used; a store of ``shard/store/stores.py`` has them."""
        return self not in (Tier.DEVICE, Tier.HOST)


@dataclass(frozen=True)
class PlacementRow:
    """One row of the placement table: where each state lies over the ranks, and in which memory it rests."""

    parameter: Placement
    gradient: Placement
    optimizer: Placement
    parameter_tier: Tier = Tier.DEVICE
    gradient_tier: Tier = Tier.DEVICE  # of the sum; a full gradient is on the device until it is reduced
    optimizer_tier: Tier = Tier.DEVICE
    offloaded: float = 1.0  # share of the model, in whole units, whose states are on their tiers
    pinned: bool = True  # whether host memory is page-locked
    split: bool = False  # whether masters off the device are halves, of which one is their bf16 parameter

    @property
    def on_device(self) -> PlacementRow:
        """The same with all states on the device, where sharded parameters take no memory beside their masters."""
        return replace(self, parameter_tier=Tier.DEVICE, gradient_tier=Tier.DEVICE, optimizer_tier=Tier.DEVICE)

    def __post_init__(self) -> None:
        # What is communicated follows from neighbouring cells, which have no collective for the other order.
        order = [self.parameter, self.gradient, self.optimizer]
        sharded = [placement is Placement.SHARDED for placement in order]
        if sharded != sorted(sharded):
            raise ValueError(
                f"placement parameter={self.parameter.value}, gradient={self.gradient.value}, "
                f"optimizer={self.optimizer.value}: a sharded parameter needs a sharded gradient, and a sharded "
                "gradient a sharded optimizer; use one of the rows in zeromesh.base.placement.ROWS"
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
"""Rows by their ZeRO number, tiers on the device."""


def offloaded_units(sizes: Sequence[float], row: PlacementRow, accumulates: bool) -> list[bool]:
    """Return which units have their states on the tiers of the row, by their elements; the first one is the root.

    The others stay on the device, as far as their share of the model goes. Without accumulation these are the first
    ones: their gradients come last, so their update could not run beside the backward. Otherwise they are spread over
    the model: while such a unit computes, the host adds another's gradients to their sum.
    """
    budget, rest = (1 - row.offloaded) * sum(sizes), sum(sizes[1:])
    offloaded, on_device, passed = [], 0.0, 0.0
    for place, size in enumerate(sizes):
        if place == 1:  # what the root leaves
            budget, on_device = budget - on_device, 0.0
        passed += size if place else 0.0
        due = budget * passed / rest if accumulates and place and rest else budget
        offloaded.append(on_device + size > due * (1 + 1e-9))
        on_device += 0.0 if offloaded[-1] else size
    return offloaded
