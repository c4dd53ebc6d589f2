"""What ``initialize`` makes of its arguments: the loader, the optimizer's defaults, the inputs of 16-bit runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeromesh
from harness import run_ranks

SGD = {"type": "SGD", "params": {"lr": 0.1}}


def config(**more: Any) -> dict[str, Any]:
    return {"optimizer": SGD, "train_micro_batch_size_per_gpu": 2, **more}


# The loader.


def orders(seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """This rank's samples in four passes over the loader, then in pass 1 and the next one again."""
    loader = zeromesh.initialize(nn.Linear(1, 1), config=config(seed=seed), training_data=torch.arange(24))[2]
    passes = [torch.cat(list(loader)).tolist() for _ in range(4)]
    loader.sampler.set_epoch(1)
    return passes, [torch.cat(list(loader)).tolist() for _ in range(2)]


def test_every_pass_over_the_loader_has_an_order_of_its_own_that_follows_from_the_seed() -> None:
    (first, again), (second, _) = run_ranks(orders, 2, 7)
    for one, other in zip(first, second, strict=True):
        assert sorted(one + other) == list(range(24))
    assert len({tuple(one) for one in first}) == 4
    assert again == first[1:3]
    assert run_ranks(orders, 2, 7)[0][0] == first
    assert run_ranks(orders, 2, 8)[0][0] != first


# The optimizer's defaults.


def decay(type: str, params: dict[str, Any]) -> tuple[str, float]:
    settings = config(optimizer={"type": type, "params": {"lr": 0.1, **params}})
    optimizer = zeromesh.initialize(nn.Linear(2, 2), config=settings)[1]
    return optimizer.__class__.__name__, optimizer.param_groups[0]["weight_decay"]


@pytest.mark.parametrize(
    ("type", "params", "expected"),
    [
        ("AdamW", {}, ("AdamW", 0.01)),
        ("adamw", {"weight_decay": "auto"}, ("AdamW", 0.01)),
        ("AdamW", {"weight_decay": 0.1}, ("AdamW", 0.1)),
        ("Adam", {}, ("AdamW", 0.0)),
        ("Adam", {"adam_w_mode": False}, ("Adam", 0.0)),
    ],
)
def test_weights_decay_as_in_torch_unless_the_configuration_says_how(
    type: str, params: dict[str, Any], expected: tuple[str, float]
) -> None:
    assert run_ranks(decay, 1, type, params) == [expected]


# Inputs of 16-bit runs.


class Inputs(nn.Module):
    """Remembers the dtype of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.dtype)
        return self.linear(x.to(self.linear.weight.dtype)).square().mean()


def seen(key: str, **options: Any) -> list[torch.dtype]:
    engine = zeromesh.initialize(Inputs(), config=config(**{key: {"enabled": True, **options}}))[0]
    engine(torch.ones(1, 2))
    return engine.module.seen


@pytest.mark.parametrize(("key", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_inputs_are_cast_unless_auto_cast_is_false(key: str, dtype: torch.dtype) -> None:
    assert run_ranks(seen, 1, key) == [[dtype]]
    assert run_ranks(seen, 1, key, auto_cast=False) == [[torch.float32]]


# Groups that were started otherwise.


def other_groups(backend: str | None, mesh: dict[str, int]) -> list[torch.Tensor]:
    dist.barrier()  # not before all ranks have joined the first one
    dist.destroy_process_group()
    dist.init_process_group(backend)
    found = []
    for row in (0, 3):
        torch.manual_seed(dist.get_rank())
        model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
        engine = zeromesh.initialize(model, config=config(zero_optimization={"stage": row}, mesh=mesh))[0]
        for step in range(2):
            engine.backward(engine(torch.eye(3) + engine.data_rank + step).square().mean())
            engine.step()
        state = engine.gathered_state_dict()
        found.append(torch.cat([value.flatten().double() for value in state.values()]) if state else torch.empty(0))
    return found


@pytest.mark.parametrize("backend", [None, "cpu:gloo"])
@pytest.mark.parametrize("mesh", [{"data": 4}, {"replicate": 2, "data": 2}], ids=["one axis", "two axes"])
def test_a_group_that_was_started_with_another_name_trains_as_with_gloo(
    backend: str | None, mesh: dict[str, int]
) -> None:
    expected = run_ranks(other_groups, 4, "gloo", mesh)[0]
    for found, value in zip(run_ranks(other_groups, 4, backend, mesh)[0], expected, strict=True):
        assert torch.equal(found, value)


class Look(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x
        return super().forward(x)


def seen_by_the_model(dtype: torch.dtype) -> list[float]:
    settings = config(fp16={"enabled": True}, scheduler={"type": "LambdaLR", "params": {"lr_lambda": float}})
    engine = zeromesh.initialize(Look(4, 4), config=settings)[0]
    engine(torch.tensor([[-1e9, 1e9, float("-inf"), 2.0]], dtype=dtype))
    return engine.module.seen.tolist()[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_that_are_finite_stay_finite_in_fp16(dtype: torch.dtype) -> None:
    assert run_ranks(seen_by_the_model, 2, dtype)[1] == [-65504.0, 65504.0, float("-inf"), 2.0]
