"""Ranks whose forwards use blocks in different numbers and orders, some of them several times."""

import copy
import random

import pytest
import torch
from torch import nn

import zeromesh
from harness import run_ranks, spawn_ranks
from run import sgd, start_engine, train_step, whole_parameters
from zeromesh.comm import watchdog

BLOCKS, STEPS = 5, 3


class Program(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(6, 6, dtype=torch.float64) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor, calls: list[int]) -> torch.Tensor:
        for number in calls:
            x = x + torch.tanh(self.blocks[number](x))
        return x.square().mean()


def calls_of(seed: int, rank: int, step: int) -> list[int]:
    chance = random.Random(f"{seed} {rank} {step}")
    return [chance.randrange(BLOCKS) for _ in range(chance.randrange(1, 9))]


def batch_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


def train(seed: int, slots: int, patience: float = 30.0) -> list[torch.Tensor]:
    watchdog.PATIENCE = patience
    engine = start_engine(Program(), micro=3, stage=3, slots={"parameter": slots}, units=["Linear"], optimizer=sgd(0.1))
    rank = engine.mesh.rank
    for step in range(STEPS):
        train_step(engine, engine(batch_of(rank, step), calls_of(seed, rank, step)))
    return list(whole_parameters(engine.module).values())


def plain(seed: int, ranks: int) -> list[torch.Tensor]:
    model = Program()
    for step in range(STEPS):
        parts = [copy.deepcopy(model) for _ in range(ranks)]
        for rank, part in enumerate(parts):
            part(batch_of(rank, step), calls_of(seed, rank, step)).backward()
        with torch.no_grad():
            for parameter, *copies in zip(model.parameters(), *(part.parameters() for part in parts), strict=True):
                gradients = [one.grad for one in copies if one.grad is not None]
                if gradients:
                    parameter -= 0.1 * torch.stack(gradients).sum(0) / ranks
    return list(model.parameters())


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 12))])
def test_with_slots_for_all_blocks_ranks_may_use_them_as_they_like(seed: int) -> None:
    expected = plain(seed, 2)
    for found in run_ranks(train, 2, seed, BLOCKS):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def use_again_on_one_rank() -> None:  # rank 0 comes back to a block whose slot another one has taken; rank 1 does not
    watchdog.PATIENCE = 0.6
    config = {"zero_optimization": {"stage": 3}, "slots": {"parameter": 2}, "units": ["Linear"]}
    engine, *_ = zeromesh.initialize(
        model=Program(), config=config | {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    )
    calls = [0, 1, 2, 0, 3, 4] if engine.mesh.rank == 0 else [0, 1, 2, 3, 4]
    train_step(engine, engine(batch_of(0, 0), calls))


@pytest.mark.full
def test_with_fewer_slots_blocks_that_one_rank_uses_again_end_the_run_with_the_remedy() -> None:
    said = "".join(outcome.output for outcome in spawn_ranks(use_again_on_one_rank, 2, timeout=30))
    assert "every rank has waited" in said
    assert "raise slots.parameter to the number of blocks" in said
