"""An optimizer that the engine does not have: what is said when it, or the engine, is stepped."""

from copy import deepcopy

import pytest
import torch
from torch import nn

import zeromesh


def test_an_optimizer_that_was_not_passed_to_initialize_is_told_so() -> None:
    model = nn.Linear(4, 1)
    before = torch.optim.AdamW(model.parameters(), lr=0.1)
    config = {"train_batch_size": 2, "zero_optimization": {"stage": 3}}
    engine, *_ = zeromesh.initialize(model=model, config=config)
    for optimizer in (before, torch.optim.SGD(engine.parameters(), lr=0.1)):
        engine.backward(engine(torch.ones(2, 4)).sum())
        with pytest.raises(RuntimeError, match=r"step\(\) would update parameters .* optimizer=optimizer, and call en"):
            optimizer.step()
    with pytest.raises(RuntimeError, match=r"needs an optimizer, and initialize was given none: .*optimizer=optimizer"):
        engine.step()
    engine.destroy()


def test_a_second_optimizer_is_warned_of_where_gradients_are_whole(caplog: pytest.LogCaptureFixture) -> None:
    model, other = nn.Linear(4, 1), nn.Linear(4, 1)
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = zeromesh.initialize(model=model, config=config)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 4)).sum())
        optimizer.step()
        optimizer.zero_grad()
    assert caplog.text.count("updates them by SGD in engine.step(); leave out this one") == 1
    other(torch.ones(2, 4)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    engine.destroy()


def test_an_optimizer_over_another_model_is_refused_with_a_few_of_its_parameters() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    optimizer = torch.optim.AdamW(deepcopy(model).parameters())
    with pytest.raises(ValueError, match=r"not the model's: .*and 13 more; build it over .* a function, as optimizer="):
        zeromesh.initialize(model=model, optimizer=optimizer, config={"train_batch_size": 2})
