"""Linear layers in tiles: the same numbers, and never in memory as a whole."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from harness import run_ranks
from run import adamw, start_engine, train_step
from zeromesh.zero import TiledLinear, join_tiles, tile_linears

WIDTH, WIDE = 24, 1000
MOST = 3000
"""Elements of a tile, where the whole layers have 24000."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), Block()).double()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


@pytest.mark.some(4)
@pytest.mark.parametrize("splits", [(1, 1), (1, 5), (7, 1), (3, 4)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_in_tiles_computes_what_it_did(splits: tuple[int, int], bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(30, 22, bias=bias, dtype=torch.float64)
    tiled = TiledLinear.of(linear, *splits)
    x = torch.randn(5, 3, 30, dtype=torch.float64, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    linear(x).square().sum().backward()
    tiled(y).square().sum().backward()
    torch.testing.assert_close(tiled(y), linear(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(y.grad, x.grad, rtol=1e-12, atol=1e-12)
    gradients = join_tiles({name: parameter.grad for name, parameter in tiled.named_parameters()})
    for name, parameter in linear.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-12, atol=1e-12)
    assert join_tiles(tiled.state_dict()).keys() == linear.state_dict().keys()
    assert all(torch.equal(value, linear.state_dict()[name]) for name, value in join_tiles(tiled.state_dict()).items())


def test_initial_values_have_the_range_of_the_whole_layers() -> None:
    tiled = TiledLinear(400, 300, in_splits=8, out_splits=3)
    bound = 1 / math.sqrt(400)
    for name, value in join_tiles(tiled.state_dict()).items():
        assert 0.95 * bound < value.abs().max() <= bound, name


def test_layers_that_are_too_large_are_put_in_tiles() -> None:
    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert tile_linears(model, MOST) == ["1.up", "1.down", "2.up", "2.down"]
    assert max(parameter.numel() for parameter in model.parameters()) <= MOST
    after = join_tiles(model.state_dict())
    assert list(after) == list(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert tile_linears(model, MOST) == []
    assert tile_linears(model, 10)  # fewer than one output's inputs
    assert max(parameter.numel() for name, parameter in model.named_parameters() if "weight" in name) <= MOST


def test_layers_that_cannot_be_tiled_are_left_or_refused() -> None:
    tied = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64, bias=False))
    tied[1].weight = tied[0].weight
    assert tile_linears(tied, 100) == []
    with pytest.raises(ValueError, match="most_elements is 0"):
        tile_linears(build(), 0)
    with torch.device("meta"):
        model = build()
    with pytest.raises(ValueError, match=r"1.up has no values yet, which tiles are cut from; use TiledLinear"):
        tile_linears(model, MOST)
    with pytest.raises(ValueError, match="out_splits is 5; out_features = 4 can be cut into 1 to 4 parts"):
        TiledLinear(8, 4, out_splits=5)


def train(zero: dict[str, Any], tiles: bool, units: list[str]) -> tuple[list[float], dict[str, torch.Tensor], int]:
    model = build()
    if tiles:
        tile_linears(model, MOST)
    engine = start_engine(model, micro=4, zero=zero, optimizer=adamw(1e-2), clipping=0.5, units=units)
    losses = [train_step(engine, engine(batch(step, engine.mesh.rank)).square().mean()) for step in range(4)]
    state, report = join_tiles(engine.state_dict()), engine.memory_report()
    engine.destroy()
    return losses, state, report["slot"]["device"]


HOST = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


@pytest.mark.some(1)
@pytest.mark.parametrize("units", [[], ["Block"]])
@pytest.mark.parametrize("zero", [{"stage": 0}, {"stage": 2}, {"stage": 3}, {"stage": 3, **HOST}], ids=str)
def test_tiled_models_train_to_the_same_numbers_in_the_memory_of_few_tiles(
    zero: dict[str, Any], units: list[str]
) -> None:
    whole = run_ranks(train, 2, zero, False, units)
    tiled = run_ranks(train, 2, zero, True, units)
    for (losses, state, slots), (expected, values, before) in zip(tiled, whole, strict=True):
        assert losses == pytest.approx(expected, rel=1e-10)
        assert state.keys() == values.keys()
        for name, value in values.items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-10)
        if zero["stage"] == 3:
            assert slots < 2 * WIDTH * WIDE * 8 < before  # less than one whole layer and its gradient
