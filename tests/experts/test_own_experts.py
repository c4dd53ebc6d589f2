"""A user's own experts, stacked or in a list, named by one line of the configuration, train as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zeromesh
from compare import assert_close
from harness import run_ranks
from run import configuration, plain_step, sgd, whole_parameters
from test_forms import NUMBER, WIDTH, Stacked

STEPS = 2


class OwnMixture(nn.Module):
    """Its experts are called by the model itself, where they are a list."""

    def __init__(self, stacked: bool) -> None:
        super().__init__()
        self.into, self.router, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, NUMBER), nn.Linear(WIDTH, 1)
        lists = (nn.Sequential(nn.Linear(WIDTH, 12), nn.ReLU(), nn.Linear(12, WIDTH)) for _ in range(NUMBER))
        self.ffn: Any = Stacked() if stacked else nn.ModuleList(lists)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.into(x).flatten(0, -2)
        weights, index = self.router(hidden).softmax(-1).topk(2)
        if isinstance(self.ffn, Stacked):
            return self.out(hidden + self.ffn(hidden, index, weights)).square().mean()
        total = torch.zeros_like(hidden)
        for number, expert in enumerate(self.ffn):
            token, choice = torch.where(index == number)
            if len(token):
                total = total.index_add(0, token, expert(hidden[token]) * weights[token, choice, None])
        return self.out(hidden + total).square().mean()


def build(stacked: bool) -> OwnMixture:
    torch.manual_seed(0)
    model = OwnMixture(stacked).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return model


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 5, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def trained(stacked: bool, row: int, mesh: dict[str, int]) -> Any:
    config = configuration(sgd(0.1), row, mesh=mesh, batch=8, experts={"targets": ["ffn"]})
    engine = zeromesh.initialize(model=build(stacked), config=config)[0]
    parts = [batch(step).chunk(engine.data_size)[engine.data_rank] for step in range(STEPS)]
    losses = [float(engine.train_batch(iter([part]))) for part in parts]
    return losses, whole_parameters(engine.module)


@pytest.mark.parametrize(
    ("stacked", "row", "mesh"),
    [
        (False, 3, {"expert": 2, "data": 2}),
        pytest.param(True, 0, {"expert": 2, "data": 2}, marks=pytest.mark.full),
        pytest.param(True, 3, {"expert": 2, "data": 4}, marks=pytest.mark.full),
        pytest.param(True, 1, {"expert": 2, "data": 2, "tensor": 2}, marks=pytest.mark.full),
        pytest.param(False, 1, {"expert": 2, "data": 2, "tensor": 2}, marks=pytest.mark.full),
    ],
)
def test_own_experts_train_as_in_one_process(stacked: bool, row: int, mesh: dict[str, int]) -> None:
    model = build(stacked)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    expected = [plain_step(optimizer, model(batch(step))) for step in range(STEPS)]
    for losses, state in run_ranks(trained, mesh["data"] * mesh.get("tensor", 1), stacked, row, mesh):
        assert losses == pytest.approx(expected, rel=1e-9)
        assert_close(state, model)
