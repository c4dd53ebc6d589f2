"""The mesh: which ranks work together along which axis."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from zeromesh.base.axes import AXES, FOLDED, GRID, data_size, folded_problem, world_size
from zeromesh.base.words import counted
from zeromesh.comm import local, trust, watchdog
from zeromesh.comm.calls import compare_calls
from zeromesh.comm.collectives import Group, backend_for
from zeromesh.comm.message_formats import Format
from zeromesh.comm.mpi import backend as mpi
from zeromesh.comm.traffic import Traffic

_Shape = tuple[int, ...]

# By default group, device type, sizes and order of ranks, and axis: this rank's group. Threads and sockets of a
# group stay until the default group is destroyed, and all others with it; a process may make many engines before that.
_made: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, _Shape, _Shape, int], dist.ProcessGroup]]
_made = WeakKeyDictionary()


@dataclass(frozen=True)
class Links:
    """Links between ranks, and the use of slow ones."""

    node: int | None = None  # this rank's; None if all ranks are on one node
    hierarchical: bool | None = None  # see ``Group``
    gather: Format | None = None  # compression of parameters between nodes; None: as they are
    reduce: Format | None = None  # of gradients
    local: bool | None = None  # copy from memory to memory inside a machine; None: where the system permits it


class Mesh:
    """The processes of a run, arranged by named axes.

    Args:
        sizes: number of ranks along each axis; axes left out have size 1. The product must be the world size, without
            the size of a folded axis, such as expert, which must divide the ranks of one copy of a stage.
        device: the device on which this rank's tensors live.
        links: on which node this rank is, and what follows from it.

    Raises:
        ValueError: unknown axis, sizes whose product is not the world size, a process group without a backend for the
            device, or nodes that do not allow what ``links`` asks for.
    """

    def __init__(self, sizes: Mapping[str, int], device: torch.device, links: Links | None = None) -> None:
        unknown = sorted(set(sizes) - set(AXES))
        if unknown:
            raise ValueError(f"unknown mesh axis {unknown[0]!r}: the axes are {', '.join(AXES)}")
        self.sizes = {axis: int(sizes.get(axis, 1)) for axis in AXES}
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        if world_size(self.sizes) != self.world_size:
            product = " x ".join(f"{axis} {self.sizes[axis]}" for axis in GRID if self.sizes[axis] > 1) or "1"
            wanted = counted(world_size(self.sizes), "rank")
            raise ValueError(
                f"the mesh has {product} = {wanted}, and the run has {self.world_size}; "
                "give the data axis the size -1, which fills what is left, or start as many ranks as the mesh has"
            )
        self.device = device
        self.links = links or Links()
        self.traffic = Traffic()
        backend = backend_for(device)
        self._watchdog = None
        # An MPI that torch was built with has no store to say waits in.
        if self.world_size > 1 and backend in ("gloo", "nccl"):
            self._watchdog = watchdog.Watchdog(self.store, self.rank, self.world_size, watchdog.PATIENCE)
        self._over_mpi = self.world_size > 1 and mpi.carries() and self.links.local is not True
        self._local = None
        # With an accelerator, host memory may be of a kind that other processes cannot read.
        through_memory = device.type == "cpu" if self.links.local is None else self.links.local
        if self.world_size > 1 and backend == "gloo" and through_memory and not self._over_mpi:
            start = Group("world", dist.group.WORLD, device, Traffic())  # what starts is not counted
            self._local = local.transport(self.links.local is True, start.exchange)
        self.node_of = [0] * self.world_size  # by rank
        if self.links.node is not None:
            world = Group("world", dist.group.WORLD, device, self.traffic, self._watchdog)
            self.node_of = [int(node) for node in world.exchange(torch.tensor([self.links.node])).flatten()]
        self._groups = self._make_groups()

    @property
    def store(self) -> Any:
        """Key-value store of all ranks; None for one rank, and with an MPI that torch was built with."""
        return None if self.world_size == 1 or backend_for(self.device) == "mpi" else trust.shared_store()

    def _make_groups(self) -> dict[str, Group]:
        axes = [axis for axis in GRID if self.sizes[axis] > 1]
        groups = {axis: self._make_group(axis, None) for axis in AXES}
        groups["world"] = self._make_group("world", dist.group.WORLD)
        if len(axes) == 1:  # needs no process group of its own, whose threads and sockets cost time and memory
            groups |= {axes[0]: self._make_group(axes[0], dist.group.WORLD)}
        elif axes:
            members = _groups_of(self.device, tuple(self.sizes[a] for a in axes), self._order, range(len(axes)))
            groups |= {axis: self._make_group(axis, member) for axis, member in zip(axes, members, strict=True)}
        sharding = [axis for axis in axes if AXES[axis].shards]
        groups["shard"] = self._merged_group("+".join(sharding), sharding, groups) if sharding else groups["data"]
        alike = [axis for axis in axes if not AXES[axis].layers]
        groups["stage"] = groups["world"] if alike == axes else self._merged_group("stage", alike, groups)
        return groups | self._folded_groups(groups)

    def _folded_groups(self, groups: Mapping[str, Group]) -> dict[str, Group]:
        """Return the ranks that share experts, neighbours in a copy of a stage, and those that have the same ones."""
        size, cut = self.sizes["expert"], prod(self.sizes[axis] for axis in FOLDED)
        if size == 1:
            return {"expert_data": groups["shard"]}
        if problem := folded_problem(self.sizes):
            raise ValueError(problem)
        order = tuple(self._permuted([axis for axis in GRID if axis not in FOLDED], FOLDED).flatten().tolist())
        shape = (self.world_size // cut, cut // size, size)
        names = {1: "expert_data", 2: "expert"}
        members: dict[str, dist.ProcessGroup | None] = dict.fromkeys(names.values())
        if size == self.world_size:
            members["expert"] = dist.group.WORLD
        else:
            lasting = [place for place in range(3) if shape[place] > 1]
            wanted = [place for place in names if shape[place] > 1]
            line_groups = _groups_of(
                self.device, tuple(shape[place] for place in lasting), order, [lasting.index(place) for place in wanted]
            )
            members |= {names[place]: group for place, group in zip(wanted, line_groups, strict=True)}
        return {name: self._make_group(name, group) for name, group in members.items()}

    def _permuted(self, outer: Sequence[str], inner: Sequence[str]) -> torch.Tensor:
        """Return the ranks with these axes outside of those; shape (sizes of ``outer``, sizes of ``inner``)."""
        ranks = torch.tensor(self._order, device="cpu").view([self.sizes[axis] for axis in GRID])
        return ranks.permute([GRID.index(axis) for axis in (*outer, *inner)])

    def _merged_group(self, name: str, axes: Sequence[str], groups: Mapping[str, Group]) -> Group:
        """Return this rank's group along several axes at once, each of several ranks."""
        if len(axes) < 2:
            return groups[axes[0]] if axes else self._make_group(name, None)
        rest = [axis for axis in GRID if axis not in axes]
        order = self._permuted(rest, axes).flatten().tolist()
        sizes = [self.sizes[axis] for axis in rest if self.sizes[axis] > 1]
        shape = (*sizes, prod(self.sizes[axis] for axis in axes))
        merged = dist.group.WORLD
        if len(shape) > 1:
            (merged,) = _groups_of(self.device, shape, tuple(order), [len(shape) - 1])
        return self._make_group(name, merged)

    @property
    def _order(self) -> _Shape:
        """Ranks as they are laid row-major over the axes."""
        # Node by node, so that the ranks of one shard group (``data``) are on one node where it fits.
        return tuple(sorted(range(self.world_size), key=lambda rank: (self.node_of[rank], rank)))

    def _make_group(self, axis: str, group: dist.ProcessGroup | None) -> Group:
        ranks = [self.rank] if group is None else dist.get_process_group_ranks(group)
        nodes = [self.node_of[rank] for rank in ranks]
        hierarchical = self.links.hierarchical
        if hierarchical is None and (self.links.gather or self.links.reduce):
            hierarchical = True  # it is the step between nodes that is written in fewer bits
        carrier = None if group is None or self._local is None else local.LocalGroup.of(self._local, group)
        if group is not None and self._over_mpi:
            carrier = mpi.group_of(group)
        return Group(axis, group, self.device, self.traffic, self._watchdog, nodes, hierarchical, carrier)

    def group(self, axis: str) -> Group:
        """Return the ranks that differ from this one along ``axis`` only, or those of ``"world"`` or ``"stage"``."""
        return self._groups[axis]

    def lines(self, axis: str) -> list[list[int]]:
        """Return all groups of ranks that differ along an axis only, each in the order of the axis."""
        others = [other for other in GRID if other != axis]
        rows: list[list[int]] = self._permuted(others, [axis]).reshape(-1, self.sizes[axis]).tolist()
        return rows

    def shares(self) -> list[list[int]]:
        """Return the ranks of each share of the global batch, in the order of ``data_rank``."""
        axes = sorted(GRID, key=lambda axis: not AXES[axis].samples)
        shares: list[list[int]] = self._permuted(axes, []).reshape(self.data_size, -1).tolist()
        return shares

    def compare_calls(self) -> None:
        """Compare from now on the collectives that the program calls itself, over all ranks of their groups."""
        if self.world_size > 1:
            compare_calls(self.store, self._watchdog, watchdog.PATIENCE)

    @property
    def waited(self) -> float | None:
        """Seconds that this rank has spent in waits for others; None where they are the device's, as with nccl."""
        return None if self._watchdog is None or backend_for(self.device) != "gloo" else self._watchdog.waited

    def neighbours(self, axis: str, count: int) -> Group:
        """Return the group of ``count`` consecutive ranks on ``axis`` that contains this rank. Collective.

        Raises:
            ValueError: ``count`` does not divide the ranks along the axis.
        """
        size = self.sizes[axis]
        if size % count:
            raise ValueError(f"{size} ranks along {axis} cannot be divided into groups of {count}")
        if count == size:
            return self._groups[axis]
        name = f"{axis}/{count}"
        if name not in self._groups:
            shape = [part for a in GRID for part in ((size // count, count) if a == axis else (self.sizes[a],))]
            place = sum(1 for a in GRID[: GRID.index(axis)] if self.sizes[a] > 1) + (size > count)
            (members,) = _groups_of(self.device, tuple(part for part in shape if part > 1), self._order, [place])
            self._groups[name] = self._make_group(name, members)
        return self._groups[name]

    @property
    def stage_ranks(self) -> list[int]:
        """Ranks of this rank's pipeline stage, ascending; they hold the same part of the model."""
        place = self.group("pipeline").rank
        return sorted(line[place] for line in self.lines("pipeline"))

    @property
    def shard(self) -> Group:
        """Ranks over which states are sharded: those along data and context, which compute different gradients."""
        return self._groups["shard"]

    def shards_of(self, axis: str) -> Group:
        """Return the ranks over which states are sharded of parameters that are split along ``axis``."""
        return self._groups["expert_data" if AXES[axis].folded else "shard"]

    @property
    def replicate(self) -> Group:
        """Ranks that hold copies of this rank's shards, of other samples."""
        return self._groups["replicate"]

    @property
    def copies(self) -> list[Group]:
        """Along each axis whose ranks hold the same shards, these ranks."""
        return [self._groups[axis] for axis, role in AXES.items() if role.copies]

    @property
    def is_first_copy(self) -> bool:
        """True if this rank counts and saves its shards: no rank before it holds copies of them."""
        return all(group.rank == 0 for group in self.copies)

    @property
    def same_rows(self) -> list[Group]:
        """Along each axis whose ranks hold the same of what is not split, these ranks."""
        return [self._groups[axis] for axis, role in AXES.items() if role.same_rows]

    @property
    def data_size(self) -> int:
        """Number of shares of the global batch."""
        return data_size(self.sizes)

    @property
    def data_rank(self) -> int:
        """Index of the share of the global batch that this rank feeds."""
        rank = 0
        for axis, role in AXES.items():
            rank = rank * self.sizes[axis] + self._groups[axis].rank if role.samples else rank
        return rank

    @property
    def gradients(self) -> int:
        """Number of ranks whose gradients are averaged: those with other samples, or parts of a sequence."""
        return prod(self.sizes[axis] for axis, role in AXES.items() if role.averaged)


def _groups_of(device: torch.device, shape: _Shape, order: _Shape, axes: Sequence[int]) -> list[dist.ProcessGroup]:
    """Return this rank's group along some of several axes. The first call for a shape and order is collective."""
    world: Any = dist.group.WORLD
    groups = _made.setdefault(world, {})
    missing = [axis for axis in axes if (device.type, shape, order, axis) not in groups]
    # On the CPU, also where ``initialize`` was called under another default device.
    ranks = torch.tensor(order, device="cpu").view(shape)
    lines = {axis: ranks.movedim(axis, -1).reshape(-1, shape[axis]) for axis in missing}
    alone = bool(missing) and _can_make_alone(world, device, [_line(rows) for rows in lines.values()])
    for axis in missing:
        group = _new_group(world, lines[axis], alone)
        groups[device.type, shape, order, axis] = trust.prove(group)
    return [groups[device.type, shape, order, axis] for axis in axes]


def _can_make_alone(world: Any, device: torch.device, lines: Sequence[Sequence[int]]) -> bool:
    """Return whether the members of groups can make them one by one without all other ranks. Collective."""
    # torch names such a group by its ranks and the number of groups that each member has.
    count, store = len(dist.distributed_c10d._world.pg_names), dist.distributed_c10d._get_default_store()
    texts = ["_".join(map(str, [*sorted(line), count + number])) for number, line in enumerate(lines)]
    names = [hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest() for text in texts]
    # gloo would connect to what a group of that name, which the program has destroyed, has left there.
    used = device.type == "cpu" and dist.get_backend() == "gloo" and any(store.check([f"{n}//cpu//0/0"]) for n in names)
    counts = Group("world", world, device, Traffic()).exchange(torch.tensor([count, used], device="cpu"))
    return dist.get_backend() != "mpi" and bool((counts[:, 0] == count).all()) and not bool(counts[:, 1].any())


def _line(rows: torch.Tensor) -> list[int]:
    """Return the row of a matrix of ranks that this rank is in."""
    ranks: list[int] = rows[(rows == dist.get_rank()).any(1)][0].tolist()
    return ranks


def _new_group(world: Any, lines: torch.Tensor, alone: bool) -> Any:
    """Make this rank's group, one of the rows of a matrix; where it is possible, none of the others."""
    if world.bound_device_id is not None:  # nccl splits all of them off in one call
        return dist.split_group(world, lines.tolist())
    if alone:
        return dist.new_group(_line(lines), use_local_synchronization=True)
    rank = dist.get_rank()
    return next(group for line, group in [(line, dist.new_group(line)) for line in lines.tolist()] if rank in line)
