"""Learning rates and first steps: silent errors of other systems, and that ours are those of one process."""

import logging
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeromesh
from museum import Weights, require, results_of, weights_of, whole
from run import train_step
from zeromesh.shard.optim.schedules import build

RATES = (0.1, 0.2)
"""Of two parameter groups."""


def two_groups() -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in RATES]
    return torch.optim.SGD(groups)


def rates_of(name: str, **params: Any) -> list[list[float]]:
    """Return the rates of both groups in each of six updates."""
    optimizer = two_groups()
    schedule = build(name, {"warmup_num_steps": 2, "warmup_type": "linear", **params}, optimizer)
    found = []
    for _ in range(6):
        found.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return found


def test_every_group_warms_up_to_its_own_rate() -> None:
    require(rates_of("WarmupLR")[-1], list(RATES), [RATES[0], RATES[0]])


def test_every_group_begins_a_warm_up_at_its_lowest_rate() -> None:
    for name, params in [("WarmupLR", {}), ("WarmupCosineLR", {"total_num_steps": 6})]:
        require(
            rates_of(name, **params)[0], [0.0, 0.0], [0.0, RATES[1]]
        )  # as where one value is zipped with the groups
        require(rates_of(name, **params)[0], [0.0, 0.0], list(RATES))  # as where the optimizer steps first


@pytest.mark.parametrize(
    ("name", "params", "said"),
    [
        ("WarmupDecayLR", {"total_num_steps": 6}, "rises to its default .*0.001"),
        ("WarmupLR", {"warmup_max_lr": 1e-3}, "for all parameter groups, whose own rates are 0.1, 0.2"),
    ],
)
def test_a_rate_that_replaces_the_optimizers_is_announced(
    name: str, params: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="zeromesh"):
        rates_of(name, **params)
    assert any(re.search(said, line) for line in caplog.messages)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def rows(number: int) -> torch.Tensor:
    return torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


ADAM = {"lr": 0.1, "weight_decay": 0.01}


def scheduled() -> list[float]:
    """Return the rate of each of four updates of two micro-batches each."""
    settings = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "scheduler": {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}},
    }  # fmt: skip
    engine = zeromesh.initialize(model=net(), config=settings)[0]
    found = []
    for number in range(8):
        found += engine.get_lr() if number % 2 else []
        train_step(engine, engine(rows(number)[:2]).square().mean())
    return found


def first_of_adam(offloaded: bool) -> Weights:
    """Update once by AdamW."""
    device = {"offload_optimizer": {"device": "cpu"}} if offloaded else {}
    settings = {
        "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3, **device},
        "optimizer": {"type": "AdamW", "params": ADAM}, "units": ["Linear"],
    }  # fmt: skip
    engine = zeromesh.initialize(model=net(), config=settings)[0]
    train_step(engine, engine(rows(0).chunk(2)[dist.get_rank()]).square().mean())
    return whole(engine)


def program() -> dict[str, Any]:
    return {"rates": scheduled(), "adam": [first_of_adam(False), first_of_adam(True)]}


def test_a_schedule_moves_once_an_update_on_any_number_of_ranks() -> None:
    for found in results_of(program):
        require(found["rates"], [1.0, 0.5, 0.25, 0.125], [4.0**-number for number in range(4)])  # once on each rank
        require(found["rates"], [1.0, 0.5, 0.25, 0.125], [0.5 * 4.0**-number for number in range(4)])  # micro-batches


def test_the_first_update_of_adam_is_its_first() -> None:
    weights = []
    for steps in (0, 1):  # as where the states were made by a step with gradients of zeros, which was counted
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
        model(rows(0)).square().mean().backward()
        if steps:
            for parameter in model.parameters():
                zeros = torch.zeros_like(parameter)
                optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
        optimizer.step()
        weights.append(weights_of(model))
    for found in results_of(program):
        for updated in found["adam"]:
            require(updated, *weights)
