"""The axes of the mesh, one table: what the ranks along each of them share, and what each rank has by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from zeromesh.base.words import counted


@dataclass(frozen=True)
class AxisRole:
    """Role of the ranks that differ along one axis only."""

    samples: bool = False  # each rank has samples of its own: the axis divides the global batch
    shards: bool = False  # states are sharded over the ranks
    copies: bool = False  # the ranks hold the same shards, which the first of them counts in norms and saves
    layers: bool = False  # each rank has layers of its own
    splits: bool = False  # the ranks share the work of one copy of the model on one batch
    folded: bool = False  # its groups are cut out of those of other axes: it divides no ranks of its own

    @property
    def averaged(self) -> bool:
        """True if the ranks have different gradients of one parameter, which are averaged."""
        return self.samples or self.shards

    @property
    def same_loss(self) -> bool:
        """True if all ranks come to the same loss, from the same inputs."""
        return not (self.samples or self.layers or self.folded)

    @property
    def same_rows(self) -> bool:
        """True if all ranks hold the same of what is not split, such as rows of tables."""
        return not (self.shards or self.layers or self.folded)


# Name -> role, outermost first: ranks along the last axis are neighbours.
AXES: Mapping[str, AxisRole] = {
    "replicate": AxisRole(samples=True, copies=True),  # hybrid sharding: shard groups that hold replicas of each other
    "data": AxisRole(samples=True, shards=True),
    "pipeline": AxisRole(layers=True, splits=True),
    "context": AxisRole(shards=True, splits=True),
    "tensor": AxisRole(splits=True),
    "expert": AxisRole(folded=True),
}

GRID = tuple(axis for axis, role in AXES.items() if not role.folded)
"""Axes whose sizes, multiplied, are the number of ranks."""

FOLDED = tuple(axis for axis in GRID if not (AXES[axis].copies or AXES[axis].layers))
"""Axes out of whose ranks those of a folded axis are cut: the ranks of one copy of a stage."""


def data_size(sizes: Mapping[str, int]) -> int:
    """Return the number of shares of the global batch, from the size of every axis."""
    return prod(sizes[axis] for axis, role in AXES.items() if role.samples)


def world_size(sizes: Mapping[str, int]) -> int:
    """Return the number of ranks, from the size of every axis."""
    return prod(sizes[axis] for axis in GRID)


def folded_problem(sizes: Mapping[str, int]) -> str:
    """Return why so many ranks cannot share experts, and which numbers can; "" if they can."""
    size, cut = sizes["expert"], prod(sizes[axis] for axis in FOLDED)
    if cut % size == 0:
        return ""
    product = " x ".join(f"{axis} {sizes[axis]}" for axis in FOLDED)
    fitting = " or ".join(str(count) for count in range(2, cut + 1) if cut % count == 0)
    remedy = f"set it to {fitting}" if fitting else "leave it out"
    return (
        f"mesh.expert is {size}, which does not divide the {counted(cut, 'rank')} of one copy of a stage ({product}), "
        f"out of which the groups that share experts are cut; {remedy}, or make that product a multiple of {size}"
    )


def shard_size(sizes: Mapping[str, int]) -> int:
    """Return the number of ranks over which states are sharded, from the size of every axis."""
    return prod(sizes[axis] for axis, role in AXES.items() if role.shards)
