"""Context ranks of which neighbours share heads, while their groups pass keys and values on."""

from typing import Any

import pytest
import torch

import test_context_models as models
import test_whole_masks as masks
import zeromesh
from causal_models import throughout
from harness import run_ranks

STEPS, RATE = 2, 0.1
Trained = tuple[list[float], dict[str, torch.Tensor]]
CASES = [
    pytest.param("llama-style", "plain", {"strategy": "ring", "ulysses_degree": 2}, marks=pytest.mark.full),
    ("mistral, six heads", "packed", {"strategy": "auto"}),
    pytest.param("llama", "plain", {"strategy": "auto", "ulysses_degree": 2}, marks=pytest.mark.full),
    pytest.param("gpt_oss, six heads", "right", {"strategy": "auto"}, marks=pytest.mark.full),
    pytest.param("gemma2", "packed", {"strategy": "ring", "ulysses_degree": 2}, marks=pytest.mark.full),
    pytest.param("bert", "left", {"strategy": "auto", "ulysses_degree": 2}, marks=pytest.mark.full),
]


def build(name: str, given: str) -> tuple[Any, dict[str, torch.Tensor]]:
    room: Any = models if given == "plain" else masks
    model, batch = room.build(name), models.data(name) if given == "plain" else masks.data(name, given)
    return model, batch


def train_alone(name: str, given: str) -> Trained:
    with throughout(torch.float64):
        model, batch = build(name, given)
        optimizer, losses = torch.optim.SGD(model.parameters(), RATE), []
        for _ in range(STEPS):
            loss, _ = models.train(model, batch)
            losses.append(float(loss))
            optimizer.step()
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


def train_spread(name: str, given: str, chosen: dict[str, Any]) -> tuple[Trained, set[str]]:
    with throughout(torch.float64):
        model, batch = build(name, given)
        config = {
            "train_batch_size": 2, "mesh": {"context": 4}, "context_parallel": chosen,
            "zero_optimization": {"stage": 3}, "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        }  # fmt: skip
        engine = zeromesh.initialize(model=model, config=config)[0]
        losses = []
        for _ in range(STEPS):
            output = engine(**batch)
            loss = output if isinstance(output, torch.Tensor) else output.loss
            losses.append(float(loss))
            engine.backward(loss)
            engine.step()
        sent = {key.removesuffix("/context") for key in engine.traffic_report() if key.endswith("/context")}
        with engine.sharded.gathered(engine.sharded.units):
            return (losses, {key: x.detach().clone() for key, x in engine.module.named_parameters()}), sent


@pytest.mark.parametrize(("name", "given", "chosen"), CASES)
def test_an_engine_trains_as_one_process(name: str, given: str, chosen: dict[str, Any]) -> None:
    losses, values = train_alone(name, given)
    for (own, whole), sent in run_ranks(train_spread, 4, name, given, chosen):
        assert {"all_to_all", "ring", "ring gradients"} <= sent
        assert own == pytest.approx(losses, rel=1e-9)
        assert whole.keys() == values.keys()
        for key, value in whole.items():
            torch.testing.assert_close(value, values[key], rtol=1e-9, atol=1e-9, msg=key)
