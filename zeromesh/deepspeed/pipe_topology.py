"""``deepspeed.runtime.pipe.topology``: ranks as a grid of named axes, the last of which varies fastest."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

import torch.distributed as dist

from zeromesh.comm.trust import prove


class ProcessTopology:
    """Ranks laid out row-major over named axes, the outermost first, with a number of ranks along each."""

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes, self.dims = axes, dims
        self.ProcessCoord: Any = namedtuple("ProcessCoord", axes)  # type: ignore[misc]
        places: Any = product(*map(range, dims))
        self.mapping: dict[Any, int] = {self.ProcessCoord(*place): rank for rank, place in enumerate(places)}

    def __str__(self) -> str:
        return str(self.mapping)

    def get_rank(self, **coord_kwargs: int) -> int:
        """Return the rank at coordinates, one for each axis."""
        if len(coord_kwargs) != len(self.axes):
            raise ValueError(f"get_rank() does not support slices: give one of each of {', '.join(self.axes)}")
        coordinate = self.ProcessCoord(**coord_kwargs)
        # AssertionErrors here and below are those that programs written for DeepSpeed expect.
        if coordinate not in self.mapping:
            raise AssertionError(f"{coordinate} is outside of the axes {list(self.axes)} of {list(self.dims)} ranks")
        return self.mapping[coordinate]

    def get_axis_names(self) -> Sequence[str]:
        """Return the names of the axes."""
        return self.axes

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """Return the coordinates of a rank as text, such as ``model_01``."""
        shown = [axis for axis in self.axes if axis not in omit_axes]
        coordinate = self.get_coord(rank) if shown else ()
        return outer_sep.join(f"{axis}{inner_sep}{getattr(coordinate, axis):02d}" for axis in shown)

    def get_dim(self, axis: str) -> int:
        """Return the ranks along an axis; 0 if there is no such axis."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """Return the coordinates of a rank."""
        if not 0 <= rank < self.world_size():
            raise ValueError(f"rank {rank} is outside of a topology of {self.world_size()} ranks")
        return list(self.mapping)[rank]

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the lists of ranks whose coordinates differ along an axis only."""
        return self.lines({axis}) if axis in self.axes else []

    def lines(self, along: set[str]) -> list[list[int]]:
        """Return the lists of ranks whose coordinates differ along some axes only."""
        ranks_by_key: dict[Any, list[int]] = {}
        for coordinate, rank in self.mapping.items():
            key = tuple(place for axis, place in coordinate._asdict().items() if axis not in along)
            ranks_by_key.setdefault(key, []).append(rank)
        return list(ranks_by_key.values())

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """Return the ranks with some coordinates."""
        wanted = filter_kwargs.items()
        return [
            rank
            for coordinate, rank in self.mapping.items()
            if all(getattr(coordinate, axis) == at for axis, at in wanted)
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks at one place along an axis."""
        self.axes.index(axis)  # ValueError for an unknown axis
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        """Return the number of ranks."""
        return prod(self.dims)


class PipeDataParallelTopology(ProcessTopology):
    """Pipelines, of which ranks of one stage are neighbours."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Pipelines of split layers."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


def _prime_factors(number: int) -> list[int]:
    """Return the prime factors of a number, smallest first; raise ValueError below 1."""
    if number < 1:
        raise ValueError(f"{number} has no prime factors; give a number of ranks, 1 or more")
    smallest = next((factor for factor in range(2, number + 1) if number % factor == 0), None)
    return [] if smallest is None else [smallest, *_prime_factors(number // smallest)]


_KINDS = {
    "dp": ("data_parallel",),
    "pp": ("pipe_parallel", "pipeline_model_parallel"),
    "slice": ("slice_parallel", "tensor_model_parallel"),
    "ds_model": ("model_parallel",),
}
"""Kinds of groups, each with ``X`` of ``get_X_rank``, ``get_X_world_size`` and ``get_X_group``."""


class PipelineParallelGrid:
    """This rank's place in a topology, and its groups, which all ranks make together.

    The groups are ``dp``, ``pp``, ``slice`` (along the axis ``model``), and ``ds_model``: all ranks of one replica.
    Without a topology, the prime factors of the number of ranks are given to pipelines and data in turn.
    """

    def __init__(self, topology: ProcessTopology | None = None, process_group: Any = None) -> None:
        self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size(process_group)
        if topology is None:
            factors = _prime_factors(self.world_size)
            topology = PipeDataParallelTopology(prod(factors[::2]), prod(factors[1::2]))
        if topology.world_size() != self.world_size:
            raise AssertionError(
                f"the topology has {topology.world_size()} ranks, but {self.world_size} are running; "
                "choose sizes whose product is that"
            )
        self._topo = topology
        self.data_parallel_size, self.pipe_parallel_size, self.slice_parallel_size = (
            max(1, topology.get_dim(axis)) for axis in ("data", "pipe", "model")
        )
        self.model_parallel_size = self.slice_parallel_size
        coordinate = topology.get_coord(self.global_rank)
        self.stage_id, self.data_parallel_id = (getattr(coordinate, axis, 0) for axis in ("pipe", "data"))
        self.is_first_stage, self.is_last_stage = self.stage_id == 0, self.stage_id == self.pipe_parallel_size - 1
        axes = ({"data"}, {"pipe"}, {"model"}, {*topology.axes} - {"data"})
        lists = [topology.lines(along) for along in axes]
        self.dp_groups, self.pipe_groups = lists[:2]
        # Each stage with the next one, and the last with the first.
        self.p2p_groups = sorted([rank, line[i - len(line) + 1]] for line in lists[1] for i, rank in enumerate(line))
        for (kind, names), lines in zip(_KINDS.items(), lists, strict=True):
            pairs = [(ranks, prove(dist.new_group(ranks))) for ranks in lines]
            ranks, group = next(pair for pair in pairs if self.global_rank in pair[0])
            position = {"rank": ranks.index(self.global_rank), "world_size": len(ranks)}
            # The short names have the list of ranks as their group.
            ends = {kind: {"group": ranks, "proc_group": group}}
            ends |= {name: {"group": group, "group_ranks": ranks} for name in names}
            vars(self).update(
                {f"{name}_{end}": value for name in ends for end, value in (position | ends[name]).items()}
            )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("get_") and name[4:] in vars(self):
            return lambda: vars(self)[name[4:]]
        there = ", ".join(sorted(vars(self)))
        raise AttributeError(f"PipelineParallelGrid has no {name!r}; it has {there}, and get_X() for each of them")

    def topology(self) -> ProcessTopology:
        """Return the topology."""
        return self._topo

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """Return the rank of a stage of this rank's pipeline, with other coordinates if they are given."""
        coordinate = self._topo.get_coord(self.global_rank)
        return self._topo.get_rank(**(coordinate._asdict() | {"pipe": stage_id} | kwargs))
