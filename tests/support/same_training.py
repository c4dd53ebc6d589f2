"""A few updates by SGD with momentum: on this rank's engine, and beside it in plain torch on the same batches."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from compare import assert_close
from run import plain_step, start_engine, train_step, whole_state

STEPS = 3
Give = Callable[[int], tuple[Any, ...]]
"""From the number of a step to the arguments of the forward, which returns a loss."""


def train_on_engine(model: nn.Module, give: Give, settings: dict[str, Any], lr: float = 0.1) -> Any:
    """Return the losses, of which the last is one of evaluation, the whole state, and the shapes of parameters here."""
    optimizer = {"type": "SGD", "params": {"lr": lr, "momentum": 0.9}}
    engine = start_engine(model, settings, optimizer=optimizer)
    losses = [train_step(engine, engine(*give(step))) for step in range(STEPS)]
    shapes = {name: tuple(parameter.shape) for name, parameter in engine.module.named_parameters()}
    state = whole_state(engine.module)
    with torch.no_grad():
        return [*losses, float(engine.eval()(*give(STEPS)))], state, shapes


def require_same_training(build: Callable[[], nn.Module], give: Give, settings: dict[str, Any], lr: float = 0.1) -> Any:
    """Train both in float64 and compare; return the shapes that parameters have on this rank."""
    found, state, shapes = train_on_engine(build().double(), give, settings, lr)
    model = build().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses = [plain_step(optimizer, model(*give(step))) for step in range(STEPS)]
    with torch.no_grad():
        losses.append(float(model.eval()(*give(STEPS))))
    assert found == pytest.approx(losses, rel=1e-9)
    assert_close(state, model.state_dict())
    return shapes
