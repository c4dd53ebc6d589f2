"""An engine of a model without trainable parameters evaluates at every stage: teachers, reward and reference models."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeromesh
from harness import on_ranks
from numerics import build_net
from zeromesh import deepspeed

OFFLOADS = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
PLACES: list[dict[str, Any]] = [*({"stage": stage} for stage in range(4)), {"stage": 3, **OFFLOADS}]
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2}}


def teacher(frozen: bool = True) -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), *blocks, nn.Linear(16, 4)).requires_grad_(not frozen)


def config(place: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": 2, "zero_optimization": place, **more}


@on_ranks(2)
def test_a_frozen_model_evaluates_saves_and_lets_gradients_through(tmp_path: Path) -> None:
    for number, place in enumerate(PLACES):
        plain = teacher().eval()
        inputs, wanted = torch.randn(2, 8, requires_grad=True), torch.randn(2, 8)
        more: dict[str, Any] = (
            {"optimizer": ADAMW, "scheduler": {"type": "WarmupLR", "params": {}}} if number % 2 else {}
        )
        engine, optimizer, _, schedule = zeromesh.initialize(model=copy.deepcopy(plain), config=config(place, **more))
        assert (optimizer, schedule) == (None, None)
        engine.train()
        engine.eval()
        assert torch.allclose(engine(inputs), plain(inputs))
        engine(inputs).square().sum().backward()
        other = inputs.detach().clone().requires_grad_()
        plain(other).square().sum().backward()
        assert torch.allclose(inputs.grad, other.grad)
        engine.save_checkpoint(tmp_path, tag=str(number))
        engine.load_checkpoint(tmp_path, tag=str(number))
        engine.load_state_dict(engine.state_dict())
        assert torch.allclose(engine(wanted), plain(wanted))
        for call in (lambda: engine.backward(engine(inputs).sum()), engine.step):  # noqa: B023
            with pytest.raises(RuntimeError, match="no trainable parameters at initialize.*requires_grad"):
                call()
        engine.destroy()


@on_ranks(2)
def test_a_trainable_model_without_parameters_to_update_evaluates() -> None:
    for stage in range(4):
        plain = teacher(frozen=False).eval()
        inputs = torch.randn(2, 8)
        named = {"model": copy.deepcopy(plain), "model_parameters": [], "config": config({"stage": stage})}
        engine, *_ = deepspeed.initialize(**named)
        with torch.no_grad():
            assert torch.allclose(engine(inputs), plain(inputs))
        assert {n: v.shape for n, v in engine.module_state_dict().items()} == {
            n: v.shape for n, v in plain.state_dict().items()
        }
        engine.destroy()


@on_ranks(2)
def test_a_frozen_model_is_split_and_cut() -> None:
    for axis in ("tensor", "pipeline"):
        plain = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).requires_grad_(False).double()
        inputs = torch.ones(2, 8, dtype=torch.float64)
        engine, *_ = zeromesh.initialize(
            model=copy.deepcopy(plain), config=config({"stage": 1}, mesh={axis: 2}), loss_fn=nn.functional.mse_loss
        )
        loss = engine.eval_batch(iter([(inputs, inputs)]))
        torch.testing.assert_close(loss, nn.functional.mse_loss(plain(inputs), inputs))
        with pytest.raises(RuntimeError, match="no trainable parameters at initialize"):
            engine.train_batch(iter([(inputs, inputs)]))
        engine.destroy()


@on_ranks(1)
def test_what_would_have_nothing_to_update_is_refused() -> None:
    frozen, trained = build_net(torch.float32).requires_grad_(False), build_net(torch.float32)
    adam = torch.optim.Adam(frozen.parameters())
    for given in ({"optimizer": adam}, {"lr_scheduler": lambda _: None}):
        with pytest.raises(ValueError, match="no trainable parameters to update.*requires_grad"):
            zeromesh.initialize(model=frozen, config=config({"stage": 0}), **given)
    with pytest.raises(ValueError, match="model_parameters is empty; leave it out"):
        zeromesh.initialize(model=trained, model_parameters=[], config=config({"stage": 0}, optimizer=ADAMW))
