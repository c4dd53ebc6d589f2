"""Gradients added up over ranks or backwards instead of averaged, beside plain torch."""

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import zeromesh
from harness import run_ranks
from run import train_step
from zeromesh.apps.train.architectures.decoder import Decoder
from zeromesh.apps.train.train_settings import ModelShape
from zeromesh.shard.sharded import ShardedModel


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def data(rank: int, number: int) -> torch.Tensor:
    return torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * rank + number))


SGD: dict[str, Any] = {"optimizer": {"type": "SGD", "params": {"lr": 0.5}}, "train_micro_batch_size_per_gpu": 2}


def summed(stage: int) -> list[torch.Tensor]:
    config = SGD | {"gradient_allreduce_op": "sum", "zero_optimization": {"stage": stage}}
    model = net()
    engine = zeromesh.initialize(model=model, config=config)[0]
    for number in range(2):
        train_step(engine, engine(data(engine.data_rank, number)).square().mean())
    return list(engine.gathered_state_dict().values())


def several() -> list[list[torch.Tensor]]:
    return [summed(stage) for stage in (0, 2, 3)]


def test_the_sum_over_ranks_is_the_gradient_of_the_sum_of_their_losses() -> None:
    plain = net()
    for number in range(2):
        plain.zero_grad()
        for rank in range(2):  # a sum of two numbers is the same in any order, and the ranks' number is a power of two
            plain(data(rank, number)).square().mean().backward()
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter -= 0.5 * parameter.grad
    for own in run_ranks(several, 2)[0]:
        for value, expected in zip(own, plain.state_dict().values(), strict=True):
            assert torch.equal(value, expected)


@pytest.mark.usefixtures("one_rank")
def test_every_step_is_an_update_where_accumulation_is_not_managed() -> None:
    model = net()
    plain = copy.deepcopy(model)
    config = SGD | {"managed_gradient_accumulation": False, "zero_optimization": {"stage": 1}}
    engine = zeromesh.initialize(model=model, config=config)[0]
    for backwards in (3, 1, 2):
        plain.zero_grad()
        for number in range(backwards):
            engine.backward(engine(data(0, number)).square().mean())
            plain(data(0, number)).square().mean().backward()
        engine.step()
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter -= 0.5 * parameter.grad
    assert engine.global_steps == 3
    for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own, expected)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_accumulation_that_is_not_managed_divides_the_loss_and_takes_any_number_of_backwards(stage: int) -> None:
    model = net()
    plain = copy.deepcopy(model)
    config = SGD | {"managed_gradient_accumulation": False, "gradient_accumulation_steps": 4}
    engine = zeromesh.initialize(model=model, config=config | {"zero_optimization": {"stage": stage}})[0]
    for backwards in (1, 3):
        plain.zero_grad()
        for number in range(backwards):
            assert not engine.is_gradient_accumulation_boundary()
            engine.backward(engine(data(0, number)).square().mean(), scale_wrt_gas=number > 0)
            (plain(data(0, number)).square().mean() / (4 if number else 1)).backward()
        engine.step()
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter -= 0.5 * parameter.grad
    assert (engine.global_steps, engine.global_samples) == (2, 4 * engine.train_micro_batch_size_per_gpu())
    with zeromesh.zero.GatheredParameters(list(model.parameters())):
        for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own, expected, rtol=0, atol=1e-7)


SHAPE = ModelShape(architecture="llama", vocab_size=32, hidden_size=32, layers=3, heads=2, sequence_length=16)


def trained(stage: int, name: str, watch: str = "") -> tuple[list[torch.Tensor], list[int], list[int], int]:
    """Return weights; bytes of gradients at each of the optimizer's steps; bytes by unit; and calls of who watches."""
    torch.manual_seed(0)
    engine, optimizer, *_ = zeromesh.initialize(
        model=Decoder(SHAPE),
        config={
            "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 0.1,
            "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"},
            "zero_optimization": {"stage": stage}, "optimizer": {"type": name, "params": {"lr": 1e-2}},
        },
    )  # fmt: skip
    found: list[int] = []
    plain, calls = ShardedModel.set_gradients, []

    def noted(self: ShardedModel, *args: Any) -> None:
        plain(self, *args)
        gradients = [piece.parameter.grad for flat in self.flats for *_, piece in flat.pieces]
        found.append(sum(gradient.nbytes for gradient in gradients if gradient is not None))

    if watch == "hook":
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
    elif watch == "wrapper":
        plain_step = optimizer.step
        optimizer.step = lambda: (plain_step(), calls.append(1))
    elif watch == "schedule":
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    tokens = torch.randint(32, (2, 17), generator=torch.Generator().manual_seed(1))
    with patch.object(ShardedModel, "set_gradients", noted):
        for number in range(4):
            batch = tokens.roll(number, 1)
            train_step(engine, engine(batch[:, :-1], batch[:, 1:]))
    sizes = [flat.master.nbytes for flat in engine.sharded.flats]
    return list(engine.gathered_state_dict().values()), found, sizes, len(calls)


@pytest.mark.some(4)
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_with_narrow_sums_are_made_as_wide_as_masters_unit_by_unit(stage: int, name: str) -> None:
    weights, seen, sizes, _ = trained(stage, name)
    assert max(seen) == seen[0] <= max(sizes) < sum(sizes) / 3, "the largest first"
    for watch in ("hook", "wrapper"):
        expected, at_once, _, calls = trained(stage, name, watch)
        assert max(at_once) > max(sizes), "a step that somebody watches is one"
        assert calls == 2
        for value, other in zip(weights, expected, strict=True):
            assert torch.equal(value, other)


@pytest.mark.usefixtures("one_rank")
def test_a_schedule_of_torch_lets_an_update_take_its_steps_unit_by_unit() -> None:
    _, seen, sizes, _ = trained(2, "AdamW", "schedule")
    assert max(seen) <= max(sizes)
