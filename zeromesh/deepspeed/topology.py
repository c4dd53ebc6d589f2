"""``deepspeed.runtime.pipe.topology``: ranks as a grid of named axes, the last of which varies fastest."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

import torch.distributed as dist

from zeromesh.deepspeed.process_groups import split_name


class ProcessTopology:
    """Ranks laid out row-major over named axes.

    Args:
        axes: names of the axes, outermost first.
        dims: number of ranks along each.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes, self.dims = list(axes), list(dims)
        self.ProcessCoord: Any = namedtuple("ProcessCoord", axes)  # type: ignore[misc]
        places: Any = product(*map(range, dims))
        self.mapping: dict[Any, int] = {self.ProcessCoord(*place): rank for rank, place in enumerate(places)}

    def __str__(self) -> str:
        return str(self.mapping)

    def get_rank(self, **coord_kwargs: int) -> int:
        """Return the rank at coordinates, one for each axis."""
        if coord_kwargs.keys() != set(self.axes):
            raise ValueError(f"get_rank() does not support slices: give one of each of {', '.join(self.axes)}")
        coordinate = self.ProcessCoord(**coord_kwargs)
        if coordinate not in self.mapping:
            raise ValueError(
                f"{coordinate} is outside of the topology of {dict(zip(self.axes, self.dims, strict=True))}"
            )
        return self.mapping[coordinate]

    def get_axis_names(self) -> list[str]:
        """Return the names of the axes."""
        return self.axes

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """Return the coordinates of a rank as text, such as ``model_01``."""
        coordinate = self.get_coord(rank)
        shown = (axis for axis in self.axes if axis not in omit_axes)
        return outer_sep.join(f"{axis}{inner_sep}{getattr(coordinate, axis):02d}" for axis in shown)

    def get_dim(self, axis: str) -> int:
        """Return the ranks along an axis; 0 if there is no such axis."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """Return the coordinates of a rank."""
        for coordinate, found in self.mapping.items():
            if found == rank:
                return coordinate
        raise ValueError(f"rank {rank} is outside of a topology of {self.world_size()} ranks")

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the lists of ranks whose coordinates differ along an axis only."""
        others = [one for one in self.axes if one != axis]
        if len(others) == len(self.axes):
            return []
        places = product(*(range(self.get_dim(one)) for one in others))
        return [self.filter_match(**dict(zip(others, place, strict=True))) for place in places]

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """Return the ranks with some coordinates."""
        wanted = filter_kwargs.items()
        return [rank for one, rank in self.mapping.items() if all(getattr(one, axis) == at for axis, at in wanted)]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks at one place along an axis."""
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


GRID_AXES = {
    "pipe_parallel": "pipe",
    "data_parallel": "data",
    **dict.fromkeys(("model_parallel", "slice_parallel", "tensor_model_parallel"), "model"),
}
"""Axis of a topology for each of the grid's groups."""

_ANSWERS = {"rank": "_places", "world_size": "_sizes", "group": "_groups", "group_ranks": "_ranks"}
"""Attribute of the grid that has the answers, by axis, for each end of a name."""


class PipelineParallelGrid:
    """This rank's place in a topology, and its groups, which all ranks make together.

    ``get_data_parallel_rank()`` and the like are ``get``, one of ``GRID_AXES``, and an end of ``_ANSWERS``.

    Args:
        topology: by default all ranks are data-parallel.
        process_group: None; the topology is of all ranks.
    """

    def __init__(self, topology: ProcessTopology | None = None, process_group: Any = None) -> None:
        self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._topology = topology or PipeDataParallelTopology(1, self.world_size)
        if self._topology.world_size() != self.world_size:
            raise ValueError(
                f"the topology has {self._topology.world_size()} ranks, but {self.world_size} are running; "
                "choose sizes whose product is that"
            )
        coordinate = self._topology.get_coord(self.global_rank)
        self._places: dict[str, int] = {axis: getattr(coordinate, axis, 0) for axis in GRID_AXES.values()}
        self._sizes = {axis: max(1, self._topology.get_dim(axis)) for axis in GRID_AXES.values()}
        self._ranks: dict[str, list[int]] = {}
        self._groups: dict[str, Any] = {}
        for axis in self._sizes:
            # An axis that the topology lacks has groups of one rank each.
            lists = self._topology.get_axis_comm_lists(axis) or [[rank] for rank in range(self.world_size)]
            for ranks in lists:
                group = dist.new_group(ranks)
                if self.global_rank in ranks:
                    self._ranks[axis], self._groups[axis] = ranks, group
        self.stage_id, self.data_parallel_id = self._places["pipe"], self._places["data"]
        self.pipe_parallel_size, self.data_parallel_size = self._sizes["pipe"], self._sizes["data"]
        self.model_parallel_size = self.slice_parallel_size = self._sizes["model"]

    def __getattr__(self, name: str) -> Any:
        kind, end = split_name(name, _ANSWERS)
        if kind not in GRID_AXES:
            raise AttributeError(f"PipelineParallelGrid has no {name!r}; see its docstring for its names")
        return lambda: getattr(self, _ANSWERS[end])[GRID_AXES[kind]]

    def get_stage_id(self) -> int:
        """Return this rank's pipeline stage."""
        return self.stage_id

    def get_data_parallel_id(self) -> int:
        """Return this rank's pipeline."""
        return self.data_parallel_id

    def get_global_rank(self) -> int:
        """Return this rank."""
        return self.global_rank

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """Return the rank of a stage of this rank's pipeline, with other coordinates if they are given."""
        coordinate = self._topology.get_coord(self.global_rank)
        return self._topology.get_rank(**(coordinate._asdict() | {"pipe": stage_id} | kwargs))

    def topology(self) -> ProcessTopology:
        """Return the topology."""
        return self._topology
