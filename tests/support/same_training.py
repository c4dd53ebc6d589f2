"""A few updates by SGD with momentum: on this rank's engine, and beside it in plain torch on the same batches."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zeromesh

STEPS = 3
Give = Callable[[int], tuple[Any, ...]]
"""From the number of a step to the arguments of the forward, which returns a loss."""


def train_on_engine(model: nn.Module, give: Give, settings: dict[str, Any], lr: float = 0.1) -> Any:
    """Return the losses, of which the last is one of evaluation, the whole state, and the shapes of parameters here."""
    optimizer = {"type": "SGD", "params": {"lr": lr, "momentum": 0.9}}
    engine = zeromesh.initialize(model=model, config={"optimizer": optimizer, **settings})[0]
    losses = []
    for step in range(STEPS):
        loss = engine(*give(step))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    shapes = {name: tuple(parameter.shape) for name, parameter in engine.module.named_parameters()}
    with zeromesh.zero.GatheredParameters(list(engine.module.parameters())):
        state = {name: value.detach().clone() for name, value in engine.module.state_dict().items()}
    with torch.no_grad():
        return [*losses, float(engine.eval()(*give(STEPS)))], state, shapes


def require_same_training(build: Callable[[], nn.Module], give: Give, settings: dict[str, Any], lr: float = 0.1) -> Any:
    """Train both in float64 and compare; return the shapes that parameters have on this rank."""
    found, state, shapes = train_on_engine(build().double(), give, settings, lr)
    model = build().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses = []
    for step in range(STEPS):
        loss = model(*give(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        losses.append(float(model.eval()(*give(STEPS))))
    assert found == pytest.approx(losses, rel=1e-9)
    for name, want in model.state_dict().items():
        assert torch.allclose(state[name], want, rtol=1e-9, atol=1e-9), name
    return shapes
