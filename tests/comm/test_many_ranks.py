"""Costs of a start over the number of ranks, by counts: groups, messages and calls of the store."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from zeromesh.comm.mesh import Mesh


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
