"""Costs of a start over the number of ranks, by counts: groups, messages and calls of the store."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from harness import run_ranks
from zeromesh.comm.collectives import Group
from zeromesh.comm.mesh import Mesh
from zeromesh.comm.rendezvous import Meeting
from zeromesh.comm.traffic import Traffic


@pytest.mark.parametrize("world", [64, 4096])
def test_a_mesh_of_five_axes_makes_only_the_groups_that_a_rank_is_in(world: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=world)
    try:
        with patch.object(distributed_c10d, "_new_group_with_tag", wraps=distributed_c10d._new_group_with_tag) as make:
            sizes = {"replicate": 2, "data": world // 32, "pipeline": 2, "context": 2, "tensor": 4}
            Mesh(sizes, torch.device("cpu"))
        # One along each axis, one over both that shard, one over a stage.
        assert len(make.call_args_list) == 7
        assert all(call.kwargs["use_local_synchronization"] for call in make.call_args_list)
    finally:
        dist.destroy_process_group()


def after_groups_that_are_gone() -> tuple[int, list[float]]:
    rank = dist.get_rank()
    for ranks in ([rank & 2, rank & 2 | 1], [rank & 1, rank & 1 | 2]):
        group = dist.new_group(ranks, use_local_synchronization=True)
        dist.all_reduce(torch.ones(1), group=group)
        dist.destroy_process_group(group)
    with patch.object(distributed_c10d, "_new_group_with_tag", wraps=distributed_c10d._new_group_with_tag) as make:
        mesh = Mesh({"replicate": 2, "data": 2}, torch.device("cpu"))
    rows = [mesh.group(axis).exchange(torch.tensor([float(rank)])) for axis in ("replicate", "data")]
    dist.barrier()
    return len(make.call_args_list), torch.cat(rows).flatten().tolist()


def test_groups_that_the_program_has_destroyed_are_not_connected_to() -> None:
    """torch gives a new group of the same ranks the name, and with it the addresses, of one that is gone."""
    found = run_ranks(after_groups_that_are_gone, 4)
    assert [calls for calls, _ in found] == [4] * 4  # two along each axis, which all ranks make together
    assert [rows for _, rows in found] == [[0, 2, 0, 1], [1, 3, 0, 1], [0, 2, 2, 3], [1, 3, 2, 3]]


def count_messages() -> tuple[list[float], int]:
    world = Group("world", dist.group.WORLD, torch.device("cpu"), Traffic())
    with patch.object(Group, "_post", autospec=True, side_effect=Group._post) as post:
        rows = world.exchange(torch.tensor([float(dist.get_rank())]))
    return rows.flatten().tolist(), sum(len(call.args[2]) for call in post.call_args_list)


@pytest.mark.parametrize("ranks", [3, 4])
def test_an_exchange_costs_a_rank_as_many_messages_as_the_number_of_ranks_has_bits(ranks: int) -> None:
    assert run_ranks(count_messages, ranks) == [([*map(float, range(ranks))], 2)] * ranks


class Missing:
    """Store in which all keys are but some, which counts the calls."""

    def __init__(self, *ranks: int) -> None:
        self.keys, self.calls = {f"here/{rank}" for rank in ranks}, 0

    def check(self, keys: list[str]) -> bool:
        self.calls += 1
        return self.keys.isdisjoint(keys)


def test_ranks_that_do_not_come_are_found_with_few_calls_of_the_store() -> None:
    meeting = Meeting.__new__(Meeting)
    meeting._store = store = Missing(7, 16000)
    assert [*meeting._missing([f"here/{rank}" for rank in range(16384)])] == ["here/7", "here/16000"]
    assert store.calls <= 4 * 14
