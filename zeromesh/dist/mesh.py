"""The mesh: which ranks work together along which axis.

Ranks are numbered row-major over the axes in the order of ``AXES``, so that the ranks of one shard group
(``data``) are neighbours, and on one node where it fits, and replicas of it lie further apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from zeromesh.dist import watchdog
from zeromesh.dist.collectives import Group, Traffic, backend_for

_Shape = tuple[int, ...]
_made: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, _Shape], list[dist.ProcessGroup]]] = WeakKeyDictionary()
"""By default group, device type and sizes: this rank's group along each axis. Threads and sockets of a group stay until
the default group is destroyed, and all others with it; a process may make many engines before that."""

AXES = ("replicate", "data", "pipeline", "context", "tensor", "expert")
"""Axis names, outermost first. ``replicate`` is hybrid sharding: states are sharded over ``data``, copied over it."""


class Mesh:
    """The processes of a run, arranged by named axes.

    Args:
        sizes: number of ranks along each axis; axes left out have size 1. The product must be the world size.
        device: the device on which this rank's tensors live.

    Raises:
        ValueError: unknown axis, sizes whose product is not the world size, or a process group without a backend for
            the device.
    """

    def __init__(self, sizes: Mapping[str, int], device: torch.device) -> None:
        unknown = sorted(set(sizes) - set(AXES))
        if unknown:
            raise ValueError(f"unknown mesh axis {unknown[0]!r}: the axes are {', '.join(AXES)}")
        self.sizes = {axis: int(sizes.get(axis, 1)) for axis in AXES}
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        if prod(self.sizes.values()) != self.world_size:
            product = " x ".join(f"{axis} {size}" for axis, size in self.sizes.items() if size > 1) or "1"
            raise ValueError(
                f"the mesh has {product} = {prod(self.sizes.values())} ranks, but {self.world_size} are running; "
                "set mesh.data to -1 to let it fill what is left, or start as many ranks as the mesh has"
            )
        self.device = device
        self.traffic = Traffic()
        watched = self.world_size > 1 and backend_for(device) == "gloo"
        store = dist.distributed_c10d._get_default_store() if watched else None
        patience = watchdog.PATIENCE
        self._watchdog = watchdog.Watchdog(store, self.rank, self.world_size, patience) if watched else None
        self._groups = self._make_groups()

    def _make_groups(self) -> dict[str, Group]:
        axes = [axis for axis in AXES if self.sizes[axis] > 1]
        groups = {axis: Group(axis, None, self.device, self.traffic, self._watchdog) for axis in AXES}
        groups["world"] = Group("world", dist.group.WORLD, self.device, self.traffic, self._watchdog)
        if not axes:
            return groups
        if len(axes) == 1:
            return groups | {axes[0]: Group(axes[0], dist.group.WORLD, self.device, self.traffic, self._watchdog)}
        members = _groups_of(self.device.type, tuple(self.sizes[axis] for axis in axes))
        return groups | {
            axis: Group(axis, member, self.device, self.traffic, self._watchdog)
            for axis, member in zip(axes, members, strict=True)
        }

    def group(self, axis: str) -> Group:
        """The ranks that differ from this one along ``axis`` only; ``"world"`` is all of them."""
        return self._groups[axis]

    @property
    def shard(self) -> Group:
        """The ranks over which states are sharded."""
        return self._groups["data"]

    @property
    def replicate(self) -> Group:
        """The ranks that hold copies of this rank's shards."""
        return self._groups["replicate"]

    @property
    def data_size(self) -> int:
        """Into how many shares the global batch is cut."""
        return self.sizes["replicate"] * self.sizes["data"]

    @property
    def data_rank(self) -> int:
        """Which share of the global batch this rank feeds."""
        return self.replicate.rank * self.sizes["data"] + self.shard.rank


def _groups_of(device_type: str, shape: _Shape) -> list[dist.ProcessGroup]:
    """This rank's group along each of several axes; made by all ranks together when they are first asked for."""
    world = dist.group.WORLD
    assert world is not None
    made = _made.setdefault(world, {})
    if (device_type, shape) not in made:
        # Imported here: a run along one axis, the usual one, need not pay for it.
        from torch.distributed.device_mesh import init_device_mesh

        made[device_type, shape] = init_device_mesh(device_type, shape).get_all_groups()
    return made[device_type, shape]
