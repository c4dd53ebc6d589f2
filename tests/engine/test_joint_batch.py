"""The gather with gradients and synchronised batch norm equal one process with the joint batch."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeromesh
from harness import on_ranks
from zeromesh.engine.joint_batch import SynchronisedBatchNorm

CLOSE = {"rtol": 1e-9, "atol": 1e-11}  # float64; sums over the batch are added in another order


def network(**options: object) -> nn.Sequential:
    """Return a small network of float64 with batch norms over images and over vectors."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, **options), nn.ReLU()), nn.Flatten(),
        nn.Sequential(nn.Linear(16, 6), nn.BatchNorm1d(6, **options), nn.Tanh()), nn.Linear(6, 2),
    ).double()  # fmt: skip


def joint_batch(samples: int) -> torch.Tensor:
    """Images whose mean is not 0."""
    return 2 + torch.randn(samples, 2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("momentum", [0.1, None])
@on_ranks(2)
def test_training_equals_one_process_with_the_joint_batch(stage: int, momentum: float | None) -> None:
    reference = network(momentum=momentum)
    model = zeromesh.sync_batch_norm(copy.deepcopy(reference))
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}
    config |= {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}
    engine, *_ = zeromesh.initialize(model, config=config)
    updates = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    images = joint_batch(8)
    own = images[dist.get_rank() * 4 :][:4]
    for _ in range(3):
        expected, found = reference(images), engine(own)
        torch.testing.assert_close(found, expected[dist.get_rank() * 4 :][:4], **CLOSE)
        updates.zero_grad()
        expected.square().mean().backward()
        updates.step()
        engine.backward(found.square().mean())
        engine.step()
    state = engine.state_dict()
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(state[name], value, **CLOSE)
    reference.eval()
    engine.eval()
    torch.testing.assert_close(engine(own[:1]), reference(own[:1]), **CLOSE)


@on_ranks(2)
def test_variances_far_from_zero_keep_their_digits() -> None:
    values = 1000 + torch.randn(64, 2, generator=torch.Generator().manual_seed(1))
    layer, reference = zeromesh.sync_batch_norm(nn.BatchNorm1d(2)), nn.BatchNorm1d(2).double()
    found, expected = layer(values[dist.get_rank() :: 2]), reference(values.double())[dist.get_rank() :: 2]
    # Units in the last place of 1000 in fp32, 2**-14, in the mean: a difference of sums of squares would be off by 0.1.
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2**-12)


@on_ranks(2)
def test_evaluation_exchanges_nothing() -> None:
    layer = zeromesh.sync_batch_norm(nn.BatchNorm1d(3)).eval()
    if dist.get_rank() == 0:  # alone: an exchange would wait for the other rank
        assert torch.equal(layer(torch.ones(2, 3)), nn.BatchNorm1d(3).eval()(torch.ones(2, 3)))


@on_ranks(2)
def test_gathered_tensors_hand_gradients_back_to_their_ranks() -> None:
    joint = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    rank = dist.get_rank()
    own = joint.detach()[2 * rank : 2 * rank + 2].t().contiguous().t().requires_grad_()  # not contiguous
    gathered = zeromesh.gather_with_gradient(own)
    assert torch.equal(gathered, joint)

    def loss(rows: torch.Tensor, of_rank: int) -> torch.Tensor:
        return (rows[2 * of_rank : 2 * of_rank + 2] @ rows.t()).logsumexp(1).mean()

    loss(gathered, rank).backward()
    sum(loss(joint, one) for one in range(2)).backward()
    torch.testing.assert_close(own.grad, joint.grad[2 * rank : 2 * rank + 2], **CLOSE)
    with pytest.raises(ValueError, match="without dimensions"):
        zeromesh.gather_with_gradient(torch.ones(()))


@pytest.mark.parametrize("kind", ["shape", "dtype"])
@on_ranks(2)
def test_tensors_that_differ_between_ranks_are_refused_on_all(kind: str) -> None:
    rank = dist.get_rank()
    own = torch.ones(2 + rank, 3) if kind == "shape" else torch.ones(2, 3, dtype=(torch.float32, torch.float64)[rank])
    other = "(3, 3)" if kind == "shape" else "float64 (2, 3)"
    with pytest.raises(ValueError, match=re.escape("float32 (2, 3); ") + ".*" + re.escape(other) + ".*drop_last"):
        zeromesh.gather_with_gradient(own)


@on_ranks(2)
def test_batches_of_different_sizes_count_by_their_samples() -> None:
    layer = zeromesh.sync_batch_norm(nn.BatchNorm1d(3).double())
    reference = nn.BatchNorm1d(3).double()
    samples = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    joint, weights = samples.detach().clone().requires_grad_(), torch.arange(15.0, dtype=torch.float64).view(5, 3)
    part = slice(0, 1) if dist.get_rank() == 0 else slice(1, 5)
    found, expected = layer(samples[part]), reference(joint)
    (found * weights[part]).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(found, expected[part], **CLOSE)
    torch.testing.assert_close(samples.grad[part], joint.grad[part], **CLOSE)
    torch.testing.assert_close(layer.running_var, reference.running_var, **CLOSE)


@on_ranks(2)
def test_16_bit_inputs_keep_their_dtype_and_have_statistics_in_fp32() -> None:
    layer = zeromesh.sync_batch_norm(nn.SyncBatchNorm(2))
    values = 3 + torch.randn(64, 2, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = layer(values[dist.get_rank() :: 2])
    reference = nn.BatchNorm1d(2)
    expected = reference(values.float())[dist.get_rank() :: 2]
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected.bfloat16(), rtol=2**-7, atol=0)  # one rounding to 8 bits, either way
    torch.testing.assert_close(layer.running_mean, reference.running_mean)


def test_modules_with_a_forward_of_their_own_stay() -> None:
    class Own(nn.BatchNorm1d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return input

    model = nn.Sequential(Own(2), nn.BatchNorm1d(2), nn.InstanceNorm1d(2), nn.LayerNorm(2))
    zeromesh.sync_batch_norm(model)
    assert [type(part) for part in model] == [Own, SynchronisedBatchNorm, nn.InstanceNorm1d, nn.LayerNorm]


def test_replaced_layers_keep_their_parameters_hooks_and_sharing() -> None:
    norm = nn.BatchNorm1d(2)
    calls: list[int] = []
    norm.register_forward_hook(lambda *_: calls.append(1))
    model = zeromesh.sync_batch_norm(nn.Sequential(norm, nn.Sequential(norm)))
    assert model[0] is model[1][0]
    assert model[0].weight is norm.weight
    model.eval()(torch.ones(1, 2))
    assert calls == [1, 1]
    with pytest.raises(ValueError, match="LazyBatchNorm1d has no size before its first batch"):
        zeromesh.sync_batch_norm(nn.Sequential(nn.LazyBatchNorm1d()))


def test_without_ranks_it_is_torchs_batch_norm() -> None:
    values = torch.randn(6, 3, dtype=torch.float64)
    layer, reference = zeromesh.sync_batch_norm(nn.BatchNorm1d(3).double()), nn.BatchNorm1d(3).double()
    if not dist.is_initialized():
        assert torch.equal(layer(values), reference(values))
    with pytest.raises(ValueError, match="2D or 3D|dimensions"):
        layer(values[0])
