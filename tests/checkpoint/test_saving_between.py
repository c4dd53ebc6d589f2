"""A checkpoint that is saved between a backward and its update is that of the update before, and changes nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness import run_ranks
from run import adamw, start_engine, train_step


def start(stage: int, **more: Any) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    return start_engine(net, micro=2, accumulation=3, optimizer=adamw(0.1), zero={"stage": stage, **more})


def batch(engine: Any, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * engine.data_rank + number)
    return torch.randn(2, 4, dtype=torch.float64, generator=generator)


def micro(engine: Any, number: int) -> None:
    train_step(engine, engine(batch(engine, number)).square().mean())


def weights(engine: Any) -> list[torch.Tensor]:
    return [value.clone() for value in engine.state_dict().values()]


def trained(folder: str, stage: int, more: dict[str, Any]) -> list[list[torch.Tensor]]:
    engine, other, resumed = (start(stage, **more) for _ in range(3))
    for number in range(3):
        micro(engine, number)
        micro(other, number)
    before = weights(engine)
    micro(engine, 3)
    engine.save_checkpoint(folder, "between the backwards")
    micro(engine, 4)
    engine.backward(engine(batch(engine, 5)).square().mean())
    engine.save_checkpoint(folder)
    engine.step()
    for number in range(3, 6):
        micro(other, number)
    resumed.load_checkpoint(folder, "between the backwards")
    assert (resumed.global_steps, resumed.global_samples) == (1, 6 * engine.mesh.data_size)
    found = weights(resumed)
    for number in range(3, 6):
        micro(resumed, number)
    on = weights(resumed)
    resumed.load_checkpoint(folder)
    return [before, found, weights(resumed), weights(engine), on, weights(other)]


@pytest.mark.parametrize(
    ("stage", "more"),
    [
        (0, {}),
        (2, {"offload_optimizer": {"device": "cpu", "update_during_backward": 1.0}}),
        (3, {}),
    ],
)
def test_a_checkpoint_between_a_backward_and_its_update_is_of_the_last_update(
    stage: int, more: dict[str, Any], tmp_path: Path
) -> None:
    for before, first, second, engine, on, other in run_ranks(trained, 2, str(tmp_path), stage, more):
        for own, one, two in zip(before, first, second, strict=True):
            assert torch.equal(own, one)
            assert torch.equal(own, two)
        for own, went_on, expected in zip(engine, on, other, strict=True):
            assert torch.equal(own, expected)
            assert torch.equal(went_on, expected)
