"""An optimizer is added by a row, its class, and a rule of the host's update: all else reads the row."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import zeromesh
from harness import run_ranks
from zeromesh.base.kernels.update_rules import RULES, UpdateRule, rule_of
from zeromesh.base.optimizer_table import OPTIMIZERS, OptimizerRow, row_of, states_of
from zeromesh.shard.optim.factory import is_elementwise, state_bytes

STEPS, SAMPLES = 3, 8


class Tilt(torch.optim.Optimizer):
    """Steps along the gradient and a mean of its signs."""

    def __init__(self, params: Any, lr: float = 0.1, tilt: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "tilt": tilt})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                if not state:
                    state["signs"] = torch.zeros_like(parameter)
                _tilt(group, 1, parameter.grad, parameter, [state["signs"]])


def _tilt(group: Any, number: int, gradient: torch.Tensor, master: torch.Tensor, states: Any) -> None:
    states[0].lerp_(gradient.sign(), group["tilt"])
    master.sub_(gradient + states[0], alpha=float(group["lr"]))


ROW = OptimizerRow(__name__, "Tilt", states=("signs",), rule="tilt")
RULE = UpdateRule(lambda group: ("signs",), ("lr", "tilt"), _tilt, counted=False)


def with_the_row(*arguments: Any) -> Any:
    """Return what a function returns while the tables have the toy."""
    function, *rest = arguments
    OPTIMIZERS.append(ROW)
    try:
        with patch.dict(RULES, {"tilt": RULE}):
            return function(*rest)
    finally:
        OPTIMIZERS.remove(ROW)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def batch(step: int) -> torch.Tensor:
    return torch.arange(SAMPLES * 5.0, dtype=torch.float64).view(SAMPLES, 5).add(step).sin()


def train(engine: zeromesh.Engine, steps: range) -> None:
    mine = slice(engine.mesh.rank, None, engine.mesh.world_size)
    for step in steps:
        engine.backward(engine(batch(step)[mine]).square().mean())
        engine.step()


def start(stage: int, offload: bool) -> zeromesh.Engine:
    zero = {"stage": stage} | ({"offload_optimizer": {"device": "cpu"}} if offload else {})
    settings = {"optimizer": {"type": "tilt", "params": {"lr": 0.05}}, "zero_optimization": zero}
    return zeromesh.initialize(model=model(), config=settings)[0]


def trained(folder: str, stage: int, offload: bool) -> dict[str, torch.Tensor]:
    """Train, save, and go on from the checkpoint in another engine."""
    engine = start(stage, offload)
    train(engine, range(STEPS))
    engine.save_checkpoint(folder)
    again = start(stage, offload)
    again.load_checkpoint(folder)
    train(again, range(STEPS, 2 * STEPS))
    return again.gathered_state_dict()


@pytest.mark.parametrize(("stage", "offload"), [(0, False), (2, False), (3, False), (2, True)])
def test_an_optimizer_of_a_row_trains_as_in_torch_and_goes_on_from_a_checkpoint(
    stage: int, offload: bool, tmp_path: Path
) -> None:
    plain = model()
    optimizer = Tilt(plain.parameters(), lr=0.05)
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        plain(batch(step)).square().mean().backward()
        optimizer.step()
    first, _ = run_ranks(with_the_row, 2, trained, str(tmp_path), stage, offload)
    assert first.keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(first[name], value, rtol=1e-9, atol=1e-12)


def facts() -> list[Any]:
    optimizer = Tilt(model().parameters())
    rule = rule_of(optimizer, optimizer.param_groups[0])
    return [row_of(Tilt) is ROW, state_bytes("tilt", {}), is_elementwise("TILT", {}), rule]


def misspell() -> None:
    settings = {"optimizer": {"type": "tilt", "params": {"rate": 1}}, "train_micro_batch_size_per_gpu": 1}
    zeromesh.initialize(model=model(), config=settings)


def test_everything_reads_the_row() -> None:
    assert with_the_row(facts) == [True, {"signs": 4.0}, True, "tilt"]
    with pytest.raises(ValueError, match=r"optimizer.type.*adam, adamw, lamb, lion, adagrad, sgd, muon,"):
        start(0, False)
    with pytest.raises(ValueError, match=r"optimizer.params.rate is not a parameter of tilt; known are lr, tilt"):
        with_the_row(misspell)


class Spreading(torch.optim.SGD):
    """An optimizer of a user's, with an attribute that has a name of one of ours."""

    spread = 0.5


def test_an_attribute_of_a_users_optimizer_is_not_taken_for_ours() -> None:
    plain = model()
    engine, *_ = zeromesh.initialize(
        model=plain, optimizer=Spreading(plain.parameters(), lr=0.1), config={"train_micro_batch_size_per_gpu": SAMPLES}
    )
    train(engine, range(1))


def test_states_of_a_class_of_another_library_follow_from_its_name() -> None:
    other = type("AdamW", (torch.optim.Optimizer,), {})
    assert states_of(type("Mine", (other,), {})) == {"exp_avg", "exp_avg_sq"}
    assert states_of(torch.optim.Optimizer) == set()
