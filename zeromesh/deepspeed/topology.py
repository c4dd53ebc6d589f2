"""``deepspeed.runtime.pipe.topology``: ranks as a grid of named axes, the last of which varies fastest."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from functools import partial
from itertools import cycle, product
from math import prod
from typing import Any

import torch.distributed as dist


class ProcessTopology:
    """Ranks laid out row-major over named axes.

    Args:
        axes: names of the axes, outermost first.
        dims: number of ranks along each.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes, self.dims = axes, dims
        self.ProcessCoord: Any = namedtuple("ProcessCoord", axes)  # type: ignore[misc]
        places: Any = product(*(range(dims[number]) for number in range(len(axes))))
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
        found = next((coordinate for coordinate, other in self.mapping.items() if other == rank), None)
        if found is None:
            raise ValueError(f"rank {rank} is outside of a topology of {self.world_size()} ranks")
        return found

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the lists of ranks whose coordinates differ along an axis only."""
        return self.lines({axis}) if axis in self.axes else []

    def lines(self, along: set[str]) -> list[list[int]]:
        """Return the lists of ranks whose coordinates differ along some axes only."""
        found: dict[Any, list[int]] = {}
        for coordinate, rank in self.mapping.items():
            key = tuple(place for axis, place in coordinate._asdict().items() if axis not in along)
            found.setdefault(key, []).append(rank)
        return list(found.values())

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """Return the ranks with some coordinates."""
        wanted = filter_kwargs.items()
        return [rank for one, rank in self.mapping.items() if all(getattr(one, axis) == at for axis, at in wanted)]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks at one place along an axis."""
        number = self.axes.index(axis)  # ValueError for an unknown axis
        return [rank for place, rank in self.mapping.items() if place[number] == idx]

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
    found, factor = [], 2
    while number > 1:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return found


_NAMES = {
    "data_parallel": "dp",
    **dict.fromkeys(("pipe_parallel", "pipeline_model_parallel"), "pp"),
    **dict.fromkeys(("slice_parallel", "tensor_model_parallel"), "slice"),
    "model_parallel": "ds_model",
}
"""Kind of group for each ``X`` of ``get_X_rank``, ``get_X_world_size`` and ``get_X_group``."""


class PipelineParallelGrid:
    """This rank's place in a topology, and its groups, which all ranks make together.

    The groups are ``dp``, ``pp``, ``slice`` (along the axis ``model``), and ``ds_model``: all ranks of one replica.

    Args:
        topology: by default the prime factors of the number of ranks are given to pipelines and data in turn.
        process_group: the ranks of the topology; by default all.
    """

    def __init__(self, topology: ProcessTopology | None = None, process_group: Any = None) -> None:
        self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size(process_group)
        if topology is None:
            sizes = {"pipe": 1, "data": 1}
            for axis, factor in zip(cycle(sizes), _prime_factors(self.world_size), strict=False):
                sizes[axis] *= factor
            topology = PipeDataParallelTopology(*sizes.values())
        if topology.world_size() != self.world_size:
            raise AssertionError(
                f"the topology has {topology.world_size()} ranks, but {self.world_size} are running; "
                "choose sizes whose product is that"
            )
        self._topo = topology
        self.data_parallel_size, self.pipe_parallel_size, self.model_parallel_size = (
            max(1, topology.get_dim(axis)) for axis in ("data", "pipe", "model")
        )
        self.slice_parallel_size = self.model_parallel_size
        coordinate = topology.get_coord(self.global_rank)
        self.stage_id, self.data_parallel_id = (getattr(coordinate, axis, 0) for axis in ("pipe", "data"))
        self.is_first_stage, self.is_last_stage = self.stage_id == 0, self.stage_id == self.pipe_parallel_size - 1
        along = {"dp": {"data"}, "pp": {"pipe"}, "slice": {"model"}, "ds_model": {*topology.axes} - {"data"}}
        lists = {kind: topology.lines(axes) for kind, axes in along.items()}
        self.dp_groups, self.pipe_groups = lists["dp"], lists["pp"]
        # Each stage with the next one, and the last with the first.
        self.p2p_groups = sorted([rank, line[i - len(line) + 1]] for line in lists["pp"] for i, rank in enumerate(line))
        for kind, lines in lists.items():
            made = [(ranks, dist.new_group(ranks)) for ranks in lines]
            ranks, group = next(pair for pair in made if self.global_rank in pair[0])
            rank, size = ranks.index(self.global_rank), len(ranks)
            # Among them dp_group, pp_group and slice_group, and ds_model_rank.
            vars(self).update({f"{kind}_{name}": value for name, value in (("group", ranks), ("proc_group", group))})
            vars(self).update({f"{kind}_rank": rank, f"{kind}_world_size": size})
            for prefix in (name for name, other in _NAMES.items() if other == kind):
                for end, value in (("rank", rank), ("world_size", size), ("group", group)):
                    vars(self)[f"get_{prefix}_{end}"] = partial(_answer, value)
        self.get_stage_id, self.get_data_parallel_id, self.get_global_rank, self.topology = (
            partial(_answer, value) for value in (self.stage_id, self.data_parallel_id, self.global_rank, topology)
        )
        self.get_data_parallel_group_ranks = partial(_answer, vars(self)["dp_group"])

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"PipelineParallelGrid has no {name!r}; it has {', '.join(sorted(vars(self)))}")

    def _is_grid_valid(self) -> bool:
        return prod(self._topo.dims) == self.world_size

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """Return the rank of a stage of this rank's pipeline, with other coordinates if they are given."""
        coordinate = self._topo.get_coord(self.global_rank)
        return self._topo.get_rank(**(coordinate._asdict() | {"pipe": stage_id} | kwargs))


def _answer(value: Any) -> Any:
    return value
