"""``hvd.DistributedOptimizer``, ``SyncBatchNorm`` and broadcasts beside one process with the joint batch."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import zeromesh.horovod as hvd
from harness import on_ranks
from test_hvd_operations import world


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3), nn.Linear(3, 1)).double()


def batch(rank: int, step: int, rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return model(rows).square().mean()


def joint_training(size: int, passes: int = 1, **sgd: Any) -> nn.Sequential:
    """One process whose gradient is the mean over ranks of the sum over passes."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **sgd)
    for step in range(3):
        optimizer.zero_grad()
        for number in range(passes):
            sum(loss_of(model, batch(rank, passes * step + number)) / size for rank in range(size)).backward()  # type: ignore[union-attr]
        optimizer.step()
    return model


def same(model: nn.Module, other: nn.Module, bound: float = 1e-12) -> None:
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=bound, atol=bound)


@on_ranks(2)
def test_updates_equal_those_of_the_joint_batch() -> None:
    with world() as (rank, size):
        expected = {passes: joint_training(size, passes) for passes in (1, 2)}
        for arguments in (
            {}, {"backward_passes_per_step": 2}, {"groups": 2}, {"gradient_predivide_factor": 2.0},
            {"groups": "lists"}, {"compression": hvd.Compression.fp16},
        ):  # fmt: skip
            model = make_model(seed=rank)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1 if rank == 0 else 9.0, momentum=0.9)
            hvd.broadcast_parameters(make_model().state_dict() if rank == 0 else model.state_dict(), root_rank=0)
            if rank == 0:
                model = make_model()
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            if arguments.get("groups") == "lists":
                arguments = {"groups": [list(model[0].parameters()), [model[2].bias]]}
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **arguments)
            assert isinstance(optimizer, torch.optim.SGD)
            passes = arguments.get("backward_passes_per_step", 1)
            for step in range(3):
                optimizer.zero_grad()
                for number in range(passes):
                    loss_of(model, batch(rank, passes * step + number)).backward()
                optimizer.step()
            same(model, expected[passes], 1e-12 if "compression" not in arguments else 2e-3)


@on_ranks(2)
def test_clipping_between_synchronize_and_step_sees_the_mean() -> None:
    with world() as (rank, size):
        model, other = make_model(), make_model()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        loss_of(model, batch(rank, 0)).backward()
        optimizer.synchronize()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        with optimizer.skip_synchronize():
            optimizer.step()
        sum(loss_of(other, batch(one, 0)) / size for one in range(size)).backward()  # type: ignore[union-attr]
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(other.parameters(), 0.01))
        torch.optim.SGD(other.parameters(), lr=0.1).step()
        same(model, other)
        optimizer.zero_grad()
        loss_of(model, batch(rank, 1)).backward()
        optimizer.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
            assert any("without optimizer.skip_synchronize() context" in str(one.message) for one in caught)
            warnings.simplefilter("error")
            for step in range(2):  # without synchronize() there is nothing to warn of
                optimizer.zero_grad()
                loss_of(model, batch(rank, step)).backward()
                optimizer.step()


@on_ranks(2)
def test_misuse_of_the_optimizer_is_an_error() -> None:
    with world() as (rank, _):
        model = make_model()
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
        loss_of(model, batch(rank, 0)).backward()
        with pytest.raises(AssertionError, match=r"zero_grad\(\) was called after backward and before step"):
            optimizer.zero_grad()
        with pytest.raises(AssertionError, match="computed 2 times since the last step.*backward_passes_per_step is 1"):
            loss_of(model, batch(rank, 1)).backward()
        optimizer.synchronize()
        twice = [("a", p) for p in model.parameters()]
        for arguments, match in (
            ({"named_parameters": twice}, "several parameters of the name a"),
            ({"named_parameters": list(model.named_parameters())[:2]}, "lacks 4 of the optimizer's parameters"),
            ({"named_parameters": list(model.parameters())}, "pairs of a name and a parameter"),
            ({"backward_passes_per_step": 0}, "backward_passes_per_step is 0"),
            ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "needs op Average, not Sum"),
            ({"groups": [[model[0].weight], [model[0].weight]]}, "a parameter twice"),
        ):
            with pytest.raises(ValueError, match=match):
                hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **arguments)


@on_ranks(2)
def test_parameters_that_one_rank_does_not_use_get_the_other_ranks_gradient() -> None:
    with world() as (rank, _):
        model = nn.ModuleDict({"all": nn.Linear(6, 1), "first": nn.Linear(6, 1)}).double()
        hvd.broadcast_parameters(model.state_dict(), 0)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
        rows = batch(0, 0)
        (model["all"](rows) + (model["first"](rows) if rank == 0 else 0)).sum().backward()
        optimizer.step()
        torch.testing.assert_close(model["first"].weight.grad, rows.sum(0, keepdim=True) / 2)
        torch.testing.assert_close(model["all"].weight.grad, rows.sum(0, keepdim=True))


@on_ranks(2)
def test_sparse_gradients_equal_dense_ones() -> None:
    with world() as (rank, size):
        for as_dense in (False, True):
            torch.manual_seed(3)
            sparse = nn.Embedding(10, 4, sparse=True).double()
            dense = nn.Embedding.from_pretrained(sparse.weight.detach().clone(), freeze=False)
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(sparse.parameters(), lr=0.5), sparse.named_parameters(), sparse_as_dense=as_dense
            )
            rows = [torch.tensor([1, 1, 4]), torch.tensor([4, 7])]
            sparse(rows[rank]).square().sum().backward()
            optimizer.step()
            sum(dense(one).square().sum() / size for one in rows).backward()  # type: ignore[union-attr]
            torch.optim.SGD(dense.parameters(), lr=0.5).step()
            torch.testing.assert_close(sparse.weight, dense.weight)
            assert sparse.weight.grad is not None
            assert sparse.weight.grad.is_sparse


@on_ranks(2)
def test_adasum_combines_the_changes_of_the_ranks() -> None:
    with world() as (rank, size):
        model, starts = make_model(), make_model()
        alone = [make_model() for _ in range(size)]
        for one, other in enumerate(alone):
            loss_of(other, batch(one, 0)).backward()
            torch.optim.SGD(other.parameters(), lr=0.1).step()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=hvd.Adasum)
        loss_of(model, batch(rank, 0)).backward()
        optimizer.step()
        for found, start, *ends in zip(
            model.parameters(), starts.parameters(), *(m.parameters() for m in alone), strict=True
        ):
            one, other = (end - start for end in ends)
            dot = (one * other).sum()
            change = one * (1 - dot / (2 * one.square().sum())) + other * (1 - dot / (2 * other.square().sum()))
            torch.testing.assert_close(found, start + change)


@on_ranks(2)
def test_uneven_numbers_of_batches_end_with_join() -> None:
    with world() as (rank, size):
        model, other = make_model(), make_model()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        for step in range(1 + rank):
            optimizer.zero_grad()
            loss_of(model, batch(rank, step)).backward()
            optimizer.step()
        assert hvd.join() == 1
        hvd.broadcast_parameters(model.state_dict(), root_rank=1)
        single = torch.optim.SGD(other.parameters(), lr=0.1)
        for ranks in ([0, 1], [1]):
            single.zero_grad()
            sum(loss_of(other, batch(one, 2 - len(ranks))) / size for one in ranks).backward()  # type: ignore[union-attr]
            single.step()
        same(model, other)


@on_ranks(3)
def test_batch_norm_over_ranks_equals_that_of_the_joint_batch() -> None:
    with world() as (rank, size):
        synced, plain = hvd.SyncBatchNorm(5).double(), nn.BatchNorm1d(5).double()
        weights = torch.randn(5, 7, dtype=torch.float64)
        parts = [
            torch.randn(2 + one, 5, 7, generator=torch.Generator().manual_seed(one), dtype=torch.float64) + one
            for one in range(size)
        ]
        own = parts[rank].clone().requires_grad_()
        whole = torch.cat(parts).requires_grad_()
        found, expected = synced(own), plain(whole)
        torch.testing.assert_close(found, expected.split([len(one) for one in parts])[rank])
        (found * weights).square().sum().backward()
        (expected * weights).square().sum().backward()
        assert own.grad is not None
        assert whole.grad is not None
        torch.testing.assert_close(own.grad, whole.grad.split([len(one) for one in parts])[rank])
        total = hvd.allreduce(synced.weight.grad, op=hvd.Sum)
        torch.testing.assert_close(total, plain.weight.grad)
        for name, buffer in plain.named_buffers():
            torch.testing.assert_close(synced.get_buffer(name), buffer)
        synced.eval()
        plain.eval()
        torch.testing.assert_close(synced(parts[rank]), plain(parts[rank]))


@on_ranks(2)
def test_closures_and_schedules_work_through_the_optimizer() -> None:
    with world() as (rank, size):
        model, other = make_model(), make_model()
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
        single = torch.optim.SGD(other.parameters(), lr=0.1)
        for step in range(2):

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, batch(rank, step))
                loss.backward()
                return loss

            optimizer.step(closure)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                schedule.step()
            single.zero_grad()
            sum(loss_of(other, batch(one, step)) / size for one in range(size)).backward()  # type: ignore[union-attr]
            single.step()
            single.param_groups[0]["lr"] *= 0.5
        same(model, other)


@on_ranks(2)
def test_a_gradient_scaler_skips_the_same_updates_on_all_ranks() -> None:
    with world() as (rank, size):
        model, other = nn.Linear(2, 1), nn.Linear(2, 1)
        hvd.broadcast_parameters(model.state_dict(), 0)
        other.load_state_dict(model.state_dict())
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        single, scaler = torch.optim.SGD(other.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
        rows = [torch.ones(1, 2) * (one + 1) for one in range(size)]
        for step in range(3):
            optimizer.zero_grad()
            overflows = step == 1 and rank == 1
            scaler.scale(model(rows[rank] * (float("inf") if overflows else 1.0)).sum()).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
            if step != 1:
                single.zero_grad()
                (other(torch.cat(rows)).sum() / size).backward()
                nn.utils.clip_grad_norm_(other.parameters(), 1.0)
                single.step()
        torch.testing.assert_close(model.weight, other.weight)


@on_ranks(2)
def test_lbfgs_takes_the_steps_that_it_takes_on_the_joint_batch() -> None:
    with world() as (rank, size):
        model, other = make_model(), make_model()
        arguments: dict[str, Any] = {"lr": 0.5, "max_iter": 4, "line_search_fn": "strong_wolfe"}
        optimizer = hvd.DistributedOptimizer(torch.optim.LBFGS(model.parameters(), **arguments))

        def train(optimizer: Any, loss: Any) -> float:
            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                value = loss()
                value.backward()
                return value

            return float([optimizer.step(closure) for _ in range(2)][-1])

        found = train(optimizer, lambda: loss_of(model, batch(rank, 0)))
        rows = [batch(one, 0) for one in range(size)]
        expected = train(
            torch.optim.LBFGS(other.parameters(), **arguments), lambda: sum(loss_of(other, one) for one in rows) / size
        )
        assert found == pytest.approx(expected)
        same(model, other, 1e-9)


@on_ranks(2)
def test_sparse_gradients_go_with_every_option() -> None:
    with world() as (rank, size):
        for arguments in (
            {"groups": 1}, {"compression": hvd.Compression.fp16}, {"gradient_predivide_factor": 2.0}, {"op": hvd.Sum},
            {"backward_passes_per_step": 2},
        ):  # fmt: skip
            torch.manual_seed(0)
            sparse, dense, head = nn.Embedding(4, 2, sparse=True), nn.Embedding(4, 2), nn.Linear(2, 1)
            dense.load_state_dict(sparse.state_dict())
            named = [("table", sparse.weight), ("weight", head.weight), ("bias", head.bias)]
            plain = torch.optim.SGD([parameter for _, parameter in named], lr=1.0)
            optimizer = hvd.DistributedOptimizer(plain, named, **arguments)
            passes = arguments.get("backward_passes_per_step", 1)
            share, other = 1.0 if "op" in arguments else 1.0 / size, copy.deepcopy(head)
            for one in range(size):
                for number in range(passes):
                    (other(dense(torch.tensor([one + number]))).sum() * share).backward()
            for number in range(passes):
                head(sparse(torch.tensor([rank + number]))).sum().backward()
            optimizer.synchronize()
            assert sparse.weight.grad is not None
            torch.testing.assert_close(sparse.weight.grad.to_dense(), dense.weight.grad, rtol=2e-3, atol=1e-3)
            torch.testing.assert_close(head.weight.grad, other.weight.grad, rtol=2e-3, atol=1e-3)


@on_ranks(2)
def test_a_new_optimizer_takes_the_place_of_one_that_is_gone() -> None:
    with world() as (rank, size):
        model = make_model()
        for _ in range(2):
            plain = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
        with pytest.raises(ValueError, match="is a DistributedOptimizer already"):
            hvd.DistributedOptimizer(optimizer, model.named_parameters())
        loss_of(model, batch(rank, 0)).backward()
        optimizer.step()
        other = make_model()
        sum(loss_of(other, batch(one, 0)) / size for one in range(size)).backward()  # type: ignore[union-attr]
        torch.optim.SGD(other.parameters(), lr=0.1).step()
        same(model, other)


@on_ranks(2)
def test_training_goes_on_after_a_reduction_that_failed() -> None:
    with world() as (rank, _):
        first, second = nn.Parameter(torch.ones(2 + rank)), nn.Parameter(torch.ones(2))
        named = [("first", first), ("second", second)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first, second], lr=1.0), named)
        (first.sum() + second.sum()).backward()
        with pytest.raises(ValueError, match=r"allreduce.first: shapes must be the same"):
            optimizer.step()
        optimizer.zero_grad()
        (first.sum() + second.sum()).backward()
        optimizer.load_state_dict(optimizer.state_dict())  # as elastic training does; nothing is pending then
        optimizer.zero_grad()
        assert hvd.allreduce(torch.ones(1), name="second").item() == 1


@on_ranks(2)
def test_adasum_does_not_reduce_gradients() -> None:
    with world() as (rank, _):
        parameter = nn.Parameter(torch.zeros(2))
        plain = torch.optim.SGD([parameter], lr=1.0)
        optimizer = hvd.DistributedOptimizer(plain, [("a", parameter)], op=hvd.Adasum, backward_passes_per_step=2)
        for _ in range(2):
            (parameter * (1.0 + rank)).sum().backward()
        optimizer.synchronize()
        assert parameter.grad is not None
        assert parameter.grad.tolist() == [2.0 + 2 * rank] * 2
        with pytest.raises(AssertionError, match="no meaning with op=hvd.Adasum"), optimizer.skip_synchronize():
            pass
        optimizer.step()
        assert parameter.tolist() == pytest.approx([-3.0] * 2)  # parallel changes are averaged


@on_ranks(3)
def test_batch_norm_counts_large_16_bit_batches_and_empty_ones() -> None:
    with world() as (rank, size):

        def images(one: int) -> torch.Tensor:
            rows = 0 if one == 1 else 40000
            return (torch.randn(rows, 2, 2, generator=torch.Generator().manual_seed(one)) + 1).half()

        synced, plain = hvd.SyncBatchNorm(2), nn.BatchNorm1d(2)
        found = synced(images(rank))
        expected = plain(torch.cat([images(one) for one in range(size)])).split([40000, 0, 40000])[rank]
        assert found.dtype == torch.float16
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(synced.running_mean, plain.running_mean)
        torch.testing.assert_close(synced.running_var, plain.running_var)


@on_ranks(2)
def test_parameters_that_thaw_later_are_reduced() -> None:
    with world() as (rank, size):
        for groups in (None, 1):
            model, other = make_model(), make_model()
            model[0].weight.requires_grad_(False)
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), groups=groups
            )
            loss_of(model, batch(rank, 0)).backward()
            optimizer.synchronize()
            assert model[0].weight.grad is None
            optimizer.zero_grad()
            model[0].weight.requires_grad_(True)
            loss_of(model, batch(rank, 0)).backward()
            optimizer.step()
            sum(loss_of(other, batch(one, 0)) / size for one in range(size)).backward()  # type: ignore[union-attr]
            torch.optim.SGD(other.parameters(), lr=0.1).step()
            same(model, other)
            with pytest.raises(ValueError, match="before hvd.DistributedOptimizer takes it"):
                optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


@on_ranks(2)
def test_gradients_are_divided_before_sums_that_would_overflow() -> None:
    with world():
        parameter = nn.Parameter(torch.zeros(2, dtype=torch.float16))
        plain = torch.optim.SGD([parameter], lr=1.0)
        optimizer = hvd.DistributedOptimizer(plain, [("a", parameter)], gradient_predivide_factor=2.0)
        (parameter * 40000.0).sum().backward()
        optimizer.synchronize()
        assert parameter.grad is not None
        assert parameter.grad.tolist() == [40000.0] * 2


@on_ranks(2)
def test_groups_are_those_of_the_first_rank_in_whatever_order_others_have_parameters() -> None:
    with world() as (rank, size):
        model, other = make_model(), make_model()
        named = list(model.named_parameters())[:: 1 - 2 * rank]
        plain = torch.optim.SGD([parameter for _, parameter in named], lr=0.1)
        optimizer = hvd.DistributedOptimizer(plain, named, groups=2)
        loss_of(model, batch(rank, 0)).backward()
        optimizer.step()
        sum(loss_of(other, batch(one, 0)) / size for one in range(size)).backward()  # type: ignore[union-attr]
        torch.optim.SGD(other.parameters(), lr=0.1).step()
        same(model, other)
