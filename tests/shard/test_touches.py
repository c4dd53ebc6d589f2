"""Parameters that a rank uses outside of their module's forward while another rank calls the module."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zeromesh
from harness import on_ranks

Parameters = Iterable[nn.Parameter]


def zero_times(parameters: Parameters) -> torch.Tensor:
    return 0.0 * sum(parameter.sum() for parameter in parameters)


# What the ranks add to the loss that do not call the adapter.
TOUCHES: dict[str, Callable[[nn.Sequential, torch.Tensor], torch.Tensor]] = {
    "sums": lambda adapter, x: zero_times(adapter.parameters()),
    "sums in another order": lambda adapter, x: zero_times(reversed(list(adapter.parameters()))),
    "norms": lambda adapter, x: sum(0.1 * one.norm() for one in adapter.parameters()),
    "squares, twice": lambda adapter, x: sum(0.1 * one.square().sum() for one in [*adapter.parameters()] * 2),
    "by name": lambda adapter, x: zero_times(one for _, one in adapter.named_parameters()),
    "state_dict": lambda adapter, x: zero_times(adapter.state_dict(keep_vars=True).values()),
    "data": lambda adapter, x: zero_times(one.data for one in adapter.parameters()),
    "the last only": lambda adapter, x: adapter[-1].weight.sum(),
    "functional": lambda adapter, x: F.linear(F.linear(x, adapter[1].weight), adapter[0].weight).square().mean(),
    "a forward of zeros": lambda adapter, x: 0.0 * adapter(torch.zeros_like(x)).sum(),
}


class Model(nn.Module):
    def __init__(self, touch: str) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.adapter = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        self.touch = TOUCHES[touch]

    def forward(self, x: torch.Tensor, calls: bool) -> torch.Tensor:
        for block in self.body:
            x = torch.tanh(block(x))
        more = self.adapter(x).square().mean() if calls else self.touch(self.adapter, x)
        return x.square().mean() + more


def make(touch: str) -> Model:
    torch.manual_seed(0)
    return Model(touch).double()


def train(touch: str, stage: int, calls: str, slots: int = 2) -> None:
    model, plain = make(touch), make(touch)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        "slots": {"parameter": slots},
    }
    engine = zeromesh.initialize(model=model, config=config)[0]
    optimizer, rank = torch.optim.SGD(plain.parameters(), 0.1), engine.mesh.rank
    for update in calls.split():
        x = torch.randn(2, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(len(update)))
        engine.backward(engine(x[rank], update[rank] == "c"))
        engine.step()
        optimizer.zero_grad()
        for one in range(2):
            (plain(x[one], update[one] == "c") / 2).backward()
        optimizer.step()
    with zeromesh.zero.GatheredParameters(list(model.parameters())):
        for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, msg=lambda text, at=name: f"{at}: {text}")
    engine.destroy()


@on_ranks(2)
def test_a_parameter_used_on_one_rank_meets_its_modules_forward_on_another() -> None:
    for touch in ("sums", "sums in another order", "norms"):
        train(touch, 3, "tt ct cc tc")


@pytest.mark.full
@pytest.mark.parametrize("touch", [*TOUCHES])
@on_ranks(2)
def test_every_use_of_parameters_meets_a_forward(touch: str) -> None:
    for stage, slots in ((3, 2), (3, 4), (2, 2)):
        for calls in ("tt ct cc tc", "ct tc", "tc tt"):
            train(touch, stage, calls, slots)
