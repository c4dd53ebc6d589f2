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


def reloaded(row: int) -> Any:
    """Train, load what ``state_dict()`` had before, and train by the same batch again."""
    config = configuration(sgd(0.1), row, mesh={"expert": 2}, batch=8, experts={"targets": ["ffn"]})
    engine = zeromesh.initialize(model=build(True), config=config)[0]
    before = {name: value.clone() for name, value in engine.module.state_dict().items()}
    losses = []
    for _ in range(2):
        engine.module.load_state_dict(before)
        losses.append(float(engine.train_batch(iter([batch(0).chunk(2)[engine.data_rank]]))))
    engine.load_state_dict(before)
    return losses, before, engine.module.state_dict()


@pytest.mark.full
@pytest.mark.parametrize("row", [0, 1, 2])
def test_the_state_of_a_plain_model_is_read_and_loaded_where_parameters_are_not_sharded(row: int) -> None:
    for losses, before, after in run_ranks(reloaded, 2, row):
        assert losses[0] == losses[1]
        assert_close(before, build(True))
        assert_close(after, build(True))


def refusal_of_plan(plan: dict[str, str]) -> str:
    mesh = {"expert": 2, "tensor": 2}
    sections = {"mesh": mesh, "micro": 8, "experts": {"targets": ["ffn"]}, "tensor_parallel": {"plan": plan}}
    try:
        zeromesh.initialize(model=build(True), config=configuration(sgd(0.1), 0, **sections))
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.full
@pytest.mark.parametrize("pattern", ["ffn", "**"])
def test_a_plan_that_splits_experts_which_ranks_share_is_refused(pattern: str) -> None:
    for text in run_ranks(refusal_of_plan, 2, {pattern: "moe_tp_experts"}):
        assert text.startswith(f"tensor_parallel.plan: {pattern!r} names ")
        assert "mesh.expert is 2" in text
        assert "leave the rule out, or set mesh.expert to 1" in text
