"""The returned optimizer answers DeepSpeed's attributes, overflows in fp16 are skipped, and groups need no rate."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeromesh
from harness import on_ranks
from run import train_step

pytestmark = pytest.mark.usefixtures("one_rank")


def start(row: int = 0, optimizer: Any = None, **keys: Any) -> Any:
    torch.manual_seed(0)
    sgd = {} if optimizer is not None else {"optimizer": {"type": "SGD", "params": {"lr": 0.125}}}
    config = {**sgd, "zero_optimization": {"stage": row}, **keys}
    return zeromesh.initialize(model=nn.Linear(2, 1), optimizer=optimizer, config=config)[:2]


@pytest.mark.some(2)
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("row", [0, 3])
@on_ranks(2)
def test_a_loss_that_is_not_finite_in_fp16_is_an_overflow_that_all_ranks_skip(row: int, dynamic: bool) -> None:
    scale = {"initial_scale_power": 4, "hysteresis": 1} if dynamic else {"loss_scale": 16}
    engine, optimizer = start(row, fp16={"enabled": True, **scale})
    seen: list[Any] = [(optimizer.cur_scale, optimizer.loss_scale, optimizer.overflow)]
    weights = []
    for bad in (None, float("inf"), None, float("nan"), None):
        loss = engine(torch.ones(1, 2)).float().sum()
        train_step(engine, loss * bad if bad is not None and engine.mesh.rank == 1 else loss)
        seen.append((optimizer.cur_scale, optimizer.loss_scale, optimizer.overflow))
        weights.append(engine.state_dict()["weight"].clone())
    kept = torch.equal(weights[0], weights[1]) and torch.equal(weights[2], weights[3])
    seen, skipped, kept, weights = seen, engine.skipped_steps, kept, weights
    scales = [16.0, 16.0, 8.0, 8.0, 4.0, 4.0] if dynamic else [16.0] * 6
    assert seen == [(s, s, number in (2, 4)) for number, s in enumerate(scales)]
    assert (skipped, kept) == (2, True)
    assert not torch.equal(weights[1], weights[2])


def test_without_a_loss_scale_it_is_1_and_an_infinite_loss_is_an_error() -> None:
    engine, optimizer = start()
    engine.backward(engine(torch.ones(1, 2)).sum() * float("inf"))
    with pytest.raises(FloatingPointError, match="the loss of micro-batch 0 of update 1 is not finite on rank 0"):
        engine.step()
    assert (optimizer.cur_scale, optimizer.loss_scale, optimizer.overflow) == (1.0, 1.0, False)


def test_the_scale_of_a_checkpoint_is_answered_and_the_optimizer_stays_what_it_was(tmp_path: Path) -> None:
    saved, optimizer = start(fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1})
    train_step(saved, saved(torch.ones(1, 2)).float().sum() * float("inf"))
    saved.save_checkpoint(tmp_path, "one")
    other, fresh = start(fp16={"enabled": True, "initial_scale_power": 10})
    assert fresh.cur_scale == 1024.0
    other.load_checkpoint(tmp_path, "one")
    assert (optimizer.cur_scale, fresh.cur_scale, fresh.overflow) == (8.0, 8.0, False)
    assert type(fresh) is torch.optim.SGD
    copy.deepcopy(fresh)
    pickle.loads(pickle.dumps(fresh))


class Own(torch.optim.Optimizer):  # steps of one size, without a learning rate; its ``loss_scale`` is its own
    loss_scale = 7

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"size": 0.25})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.sub_(parameter.grad, alpha=group["size"])


def test_groups_without_a_learning_rate_train_as_in_plain_torch(tmp_path: Path) -> None:
    engine, optimizer = start(
        optimizer=Own, steps_per_print=1, csv_monitor={"enabled": True, "output_path": str(tmp_path)}
    )
    torch.manual_seed(0)
    plain = nn.Linear(2, 1)
    reference = Own(plain.parameters())
    for _ in range(2):
        train_step(engine, engine(torch.ones(1, 2)).square().sum())
        reference.zero_grad()
        plain(torch.ones(1, 2)).square().sum().backward()
        reference.step()
    assert all(map(torch.equal, engine.module.parameters(), plain.parameters()))
    assert engine.get_lr() == [0.0]
    assert (optimizer.loss_scale, optimizer.cur_scale) == (7, 1.0)
    engine.save_checkpoint(tmp_path / "saved", "one")
    engine.load_checkpoint(tmp_path / "saved", "one")


@pytest.mark.parametrize("name", ["WarmupLR", "ExponentialLR"])
def test_a_schedule_over_groups_without_a_learning_rate_is_refused_at_once(name: str) -> None:
    params = {"gamma": 0.9} if name == "ExponentialLR" else {}
    with pytest.raises(ValueError, match=f"scheduler {name} moves learning rates, but group 0 of Own has no 'lr'"):
        start(optimizer=Own, scheduler={"type": name, "params": params})
