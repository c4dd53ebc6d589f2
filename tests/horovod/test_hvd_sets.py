"""Process sets: operations inside them, and errors about sets that cannot be."""

import os

import pytest
import torch

import zeromesh.horovod as hvd
from harness import on_ranks


@on_ranks(3)
def test_operations_in_process_sets_are_those_of_their_ranks() -> None:
    pairs = [hvd.ProcessSet([0, 1]), hvd.ProcessSet([2, 1])]
    assert (pairs[0].size(), pairs[0].rank(), pairs[0].included()) == (None, None, None)
    hvd.init(process_sets=pairs)
    rank = hvd.rank()
    own = torch.full((2,), float(rank))
    for found, (low, high) in zip(pairs, ([0, 1], [1, 2]), strict=True):
        assert (found.ranks, found.size(), found.included()) == ([low, high], 2, rank in (low, high))
        if found.included():
            assert found.rank() == rank - low
            assert hvd.allreduce(own, op=hvd.Sum, process_set=found).tolist() == [low + high] * 2
            assert hvd.allgather(own[:1], process_set=found).tolist() == [low, high]
            assert hvd.broadcast(own, high, process_set=found).tolist() == [high] * 2
            assert hvd.alltoall(own, process_set=found).tolist() == [low, high]
            assert hvd.reducescatter(own, op=hvd.Sum, process_set=found).tolist() == [low + high]
            assert hvd.allgather_object(rank, process_set=found) == [low, high]
            with pytest.raises(ValueError, match="root_rank is 5, which is not among the ranks"):
                hvd.broadcast(own, 5, process_set=found)
        else:
            with pytest.raises(ValueError, match=f"allreduce: rank {rank} is not in ProcessSet"):
                hvd.allreduce(own, process_set=found)
    assert hvd.get_process_set_ids_and_ranks() == {0: [0, 1, 2], 1: [0, 1], 2: [1, 2]}
    assert hvd.global_process_set.ranks == [0, 1, 2]
    hvd.shutdown()


@on_ranks(2)
def test_sets_that_cannot_be_are_errors_on_every_rank() -> None:
    hvd.init(process_sets="dynamic")
    rank = hvd.rank()
    first = hvd.add_process_set([0])
    for ranks, match in (
        ([0], r"process set 1 has the ranks \[0\], too"),
        ([0, 1], "process set 0 has the ranks"),
        ([0, 2], r"the ranks are \[0, 2\], but must be different ones from 0 to 1"),
        ([1, 1], "must be different ones"),
        ([], "at least one"),
        ([rank], r"ranks must be the same on all ranks, but differ:\n  rank 0: \[0\]\n  rank 1: \[1\]"),
    ):
        with pytest.raises(ValueError, match=match):
            hvd.add_process_set(ranks)
    with pytest.raises(ValueError, match="is in use already"):
        hvd.add_process_set(first)
    assert hvd.remove_process_set(first)
    assert not hvd.remove_process_set(first)
    assert not hvd.remove_process_set(hvd.global_process_set)
    with pytest.raises(ValueError, match="is not in use; pass it to hvd.init"):
        hvd.allreduce(torch.ones(1), process_set=first)
    assert hvd.add_process_set([0]).process_set_id == 2
    with pytest.raises(ValueError, match="needs a list of ranks"):
        hvd.ProcessSet(["a"])  # type: ignore[list-item]
    hvd.shutdown()


@on_ranks(2)
def test_sets_that_ranks_start_differently_leave_nothing_started() -> None:
    number = int(os.environ["RANK"])
    with pytest.raises(ValueError, match=r"ranks must be the same on all ranks, but differ"):
        hvd.init(process_sets=[hvd.ProcessSet([number])])
    assert not hvd.is_initialized()
    hvd.init()
    assert hvd.allreduce(torch.ones(1)).item() == 1
    hvd.shutdown()


@on_ranks(2)
def test_an_optimizer_of_a_set_reduces_over_its_ranks_alone() -> None:
    hvd.init()
    alone = hvd.add_process_set([1])
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("a", parameter)], process_set=alone)
    (parameter * (1 + hvd.rank())).sum().backward()
    optimizer.step()
    assert parameter.tolist() == [-1.0 - hvd.rank()] * 2
    hvd.shutdown()


@on_ranks(3)
def test_gradients_and_optimizers_stay_inside_their_set() -> None:
    pair = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[pair])
    if pair.included():
        inside = {"process_set": pair}
        for call, expected in (
            (lambda x: hvd.allreduce(x, **inside), [2.0, 2.0]),
            (lambda x: hvd.allreduce(x, op=hvd.Sum, **inside), [4.0, 4.0]),
            (
                lambda x: hvd.allgather(x, **inside)[: 2 * (1 + pair.rank())],
                [2.0, 2.0] if pair.rank() == 0 else [1.5, 1.5],
            ),
            (lambda x: hvd.broadcast(x, 2, **inside), [2.0, 2.0] if hvd.rank() == 2 else [0.0, 0.0]),
            (lambda x: hvd.alltoall(x, **inside), [1.0, 3.0]),
            (lambda x: hvd.reducescatter(x, op=hvd.Sum, **inside), [2.0, 6.0]),
        ):
            leaf = torch.ones(2, requires_grad=True)
            (call(leaf) * (1.0 + hvd.rank())).sum().backward()
            assert leaf.grad.tolist() == expected
        sparse = torch.eye(2)[[pair.rank()]].t().to_sparse(1)
        found = hvd.sparse_allreduce_async(sparse, "s", hvd.Average, process_set=pair)()
        assert found.to_dense().tolist() == [[0.5], [0.5]]
        assert hvd.broadcast_object(hvd.rank(), 2, process_set=pair) == 2
        model = torch.nn.Linear(2, 1)
        hvd.broadcast_parameters(model.state_dict(), 2, process_set=pair)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0 + hvd.rank())
        hvd.broadcast_optimizer_state(optimizer, 2, process_set=pair)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), groups=1, process_set=pair)
        start = model.weight.detach().clone()
        (model.weight * (1 + hvd.rank())).sum().backward()
        optimizer.step()
        torch.testing.assert_close(start - model.weight, torch.full((1, 2), 6.0))  # a mean of 2, and a rate of 3
        hvd.barrier(process_set=pair)
    else:
        with pytest.raises(ValueError, match="barrier: rank 1 is not in ProcessSet"):
            hvd.barrier(process_set=pair)
    hvd.barrier()
    hvd.shutdown()
