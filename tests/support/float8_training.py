"""A small model whose linear layers compute in float8: on this rank's engine, and in one plain process."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zeromesh
from compare import assert_close
from run import plain_step, train_step, whole_state
from zeromesh.base.float8_products import Float8Products
from zeromesh.base.linear_arithmetic import Columns, multiply

STEPS = 3
MICRO = 2  # samples
LR = 0.05
KEPT = ("lm_head", "odd", "back")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up_proj, self.gate_proj = nn.Linear(32, 64), nn.Linear(32, 64, bias=False)
        self.down_proj = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class Net(nn.Module):
    def __init__(self, tied: bool = False, reads: bool = True) -> None:
        super().__init__()
        self.reads = reads
        torch.manual_seed(11)
        self.embedding = nn.Embedding(48, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.odd = nn.Linear(32, 24)  # 24 does not divide by 16
        self.back = nn.Linear(24, 32)
        self.lm_head = nn.Linear(32, 48, bias=False)
        if tied:
            self.lm_head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        x = x + self.back(torch.tanh(self.odd(x)))
        # A weight that is read without a call of its layer is not rounded.
        if self.reads:
            x = x + 0.1 * F.linear(x, self.blocks[0].up_proj.weight)[..., :32]
        return F.cross_entropy(self.lm_head(x).flatten(0, 1), ids.roll(-1, 1).flatten())


def batch(step: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + number)
    return torch.randint(0, 48, (MICRO, 6), generator=generator)


def by_hand(model: nn.Module, rowwise: bool, kept: tuple[str, ...] = KEPT) -> nn.Module:
    """Replace forwards without the functions that choose and change the layers of an engine."""

    def forward(layer: nn.Linear, x: Tensor) -> Tensor:
        return multiply(x, Columns(layer.weight, layer.bias, False, Float8Products(rowwise, False)))

    for name, module in model.named_modules():
        if type(module) is nn.Linear and name not in kept:
            module.forward = partial(forward, module)
    return model


def plain(
    build: Callable[[], nn.Module], rowwise: bool, micro_batches: int, kept: tuple[str, ...] = KEPT
) -> tuple[list[float], dict[str, Tensor]]:
    model = by_hand(build().double(), rowwise, kept)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR, momentum=0.9)
    losses = []
    for step in range(STEPS):
        found = [model(batch(step, number)) for number in range(micro_batches)]
        plain_step(optimizer, sum(found) / micro_batches)
        losses.append(sum(float(loss.detach()) for loss in found) / micro_batches)
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


def on_engine(
    build: Callable[[], nn.Module], settings: dict[str, Any], accumulation: int = 1
) -> tuple[list[float], dict[str, Tensor]]:
    optimizer = {"type": "SGD", "params": {"lr": LR, "momentum": 0.9}}
    batches = {"train_micro_batch_size_per_gpu": MICRO, "gradient_accumulation_steps": accumulation}
    config = {"optimizer": optimizer, **batches, **settings}
    engine = zeromesh.initialize(model=build().double(), config=config)[0]
    ranks, rank = engine.mesh.data_size, engine.mesh.data_rank
    losses = []
    for step in range(STEPS):
        found = [train_step(engine, engine(batch(step, number * ranks + rank))) for number in range(accumulation)]
        mine = torch.tensor([sum(found) / accumulation], dtype=torch.float64)
        losses.append(float(engine.mesh.group("world").exchange(mine).mean()))
    state = whole_state(engine.module)
    engine.destroy()
    return losses, state


def require_same(found: Any, want: Any, tolerance: float = 1e-9) -> None:
    assert found[0] == pytest.approx(want[0], rel=tolerance)
    assert_close(found[1], want[1], tolerance)


def section(recipe: str = "tensorwise", **more: Any) -> dict[str, Any]:
    return {"float8": {"enabled": True, "recipe": recipe, **more}}
