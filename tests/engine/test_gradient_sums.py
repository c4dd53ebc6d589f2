"""Gradients added up over ranks or backwards instead of averaged, beside plain torch."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import zeromesh
from harness import run_ranks
from zeromesh.config.errors import ConfigError
from zeromesh.config.settings import Settings


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
        engine.backward(engine(data(engine.data_rank, number)).square().mean())
        engine.step()
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


def test_accumulation_that_is_not_managed_has_no_number_of_steps() -> None:
    config = SGD | {"managed_gradient_accumulation": False}
    with pytest.raises(ConfigError, match="gradient_accumulation_steps is 2; leave it out"):
        Settings.load(config | {"gradient_accumulation_steps": 2})
    with pytest.raises(ValueError, match="gradient_accumulation_steps is 2; leave it out"):
        Settings.load(config | {"train_batch_size": 4}).resolve(1)
