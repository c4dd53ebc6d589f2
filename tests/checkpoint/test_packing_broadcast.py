"""Values that one rank has reach the others without pickle."""

import pytest
import torch
import torch.distributed as dist

from harness import on_ranks
from zeromesh.checkpoint.packing import broadcast_value
from zeromesh.comm.agreement import world_group


@on_ranks(2)
def test_every_rank_gets_the_value_of_one() -> None:
    world, rank = world_group(torch.device("cpu")), dist.get_rank()
    tensors = [
        torch.randn(3, 2), torch.randn(4).bfloat16(), torch.tensor([True, False]), torch.empty(0, 3), torch.tensor(2.5),
        torch.arange(6).view(2, 3).t(), torch.tensor([1 + 2j, 3]).to(torch.complex64),
    ]  # fmt: skip
    value = ({"inputs": tensors, "names": ["a", "b"], 3: None}, tensors[0], 0.1)
    found = broadcast_value(value if rank == 1 else None, 1, world)
    if rank == 1:
        assert found[0]["names"] == ["a", "b"]
    every = [torch.empty(3, 2) for _ in range(2)]
    dist.all_gather(every, tensors[0])
    assert torch.equal(found[1], every[1])
    assert [(one.dtype, one.shape) for one in found[0]["inputs"]] == [(one.dtype, one.shape) for one in tensors]
    assert found[0]["inputs"][5].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert (found[0][3], found[2], float(found[0]["inputs"][4])) == (None, 0.1, 2.5)
    with pytest.raises(ValueError, match="is a object"):  # on both, and nobody waits
        broadcast_value(object() if rank == 1 else None, 1, world)
    assert broadcast_value(rank, 0, world) == 0
