"""Groups of ranks that share experts: cut out of data, context and tensor, and shards over those with the same ones."""

from itertools import product
from math import prod

import pytest
import torch

from harness import pretended_rank
from zeromesh.base.axes import FOLDED, GRID
from zeromesh.base.split import Held, Split
from zeromesh.comm.mesh import Mesh
from zeromesh.config.settings import Settings

MESHES = [
    {"data": 8, "expert": 4},
    {"data": 2, "context": 2, "tensor": 2, "expert": 4},
    {"replicate": 2, "data": 2, "tensor": 2, "expert": 2},
    {"data": 2, "pipeline": 2, "tensor": 2, "expert": 4},
    {"data": 4, "pipeline": 2, "expert": 4},
    {"data": 8, "expert": 8},
]


def groups_of(rank: int, sizes: dict[str, int]) -> tuple[list[int], list[int]]:
    with pretended_rank(rank, 8):
        mesh = Mesh(sizes, torch.device("cpu"))
        groups = mesh.group("expert"), mesh.shards_of("expert")
        assert all(group.rank == list(group._ranks or [rank]).index(rank) for group in groups)
        return tuple([*group._ranks] if group.size > 1 else [rank] for group in groups)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_ranks_that_share_experts_are_neighbours_of_one_copy_of_a_stage(sizes: dict[str, int]) -> None:
    every = {axis: sizes.get(axis, 1) for axis in GRID}
    # Of each rank, its copy of a stage and its place there, in the order data, context, tensor.
    places = [dict(zip(GRID, place, strict=True)) for place in product(*map(range, every.values()))]
    copies = [tuple(place[axis] for axis in GRID if axis not in FOLDED) for place in places]
    inside = [0] * 8
    for rank, place in enumerate(places):
        for axis in FOLDED:
            inside[rank] = inside[rank] * every[axis] + place[axis]
    size = sizes["expert"]
    for rank in range(8):
        near = [r for r in range(8) if copies[r] == copies[rank] and inside[r] // size == inside[rank] // size]
        same = [r for r in range(8) if copies[r] == copies[rank] and inside[r] % size == inside[rank] % size]
        assert groups_of(rank, sizes) == (near, same)
        assert len(near) * len(same) == prod(every[axis] for axis in FOLDED)


@pytest.mark.parametrize(
    ("mesh", "ranks", "fitting"),
    [
        ({"expert": 3}, 4, "does not divide the 4 ranks of one copy of a stage (data 4 x context 1 x tensor 1)"),
        ({"expert": 4, "pipeline": 2}, 4, "set it to 2, or make that product a multiple of 4"),
        ({"expert": 2, "replicate": 4}, 4, "cut; leave it out, or make that product a multiple of 2"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_those_that_do(mesh: dict, ranks: int, fitting: str) -> None:
    with pytest.raises(ValueError, match="mesh.expert is") as caught:
        Settings.load({"train_micro_batch_size_per_gpu": 1, "mesh": mesh}).resolve_mesh(ranks)
    assert fitting in str(caught.value)


def test_one_rank_has_all_of_an_expert_of_a_list_and_the_others_nothing() -> None:
    split, value = Split.on(0, 3, 4, 2), torch.arange(6.0).view(3, 2)
    parts = [Held((3, 2), split, rank, 4, axis="expert") for rank in range(4)]
    assert split.owner == 2
    assert [part.shape for part in parts] == [(0, 2), (0, 2), (3, 2), (0, 2)]
    assert [part.cut(value).numel() for part in parts] == [0, 0, 6, 0]
    assert [len([*part.boxes(0, part.cut(value).numel())]) for part in parts] == [0, 0, 1, 0]
    read = parts[2].read(lambda start, stop: value.flatten()[start:stop], 1, 5)
    assert read.tolist() == [1, 2, 3, 4]
