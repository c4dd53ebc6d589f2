"""Selective recomputation: results of products stay, the rest is computed again, and nothing else changes."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import zeromesh
from harness import run_ranks
from huggingface_models import MODELS
from zeromesh.parallel.activation.checkpoint import checkpoint_modules, compile_forward
from zeromesh.parallel.activation.selective import GRANULARITIES

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "ZeRO-3": (2, {"zero_optimization": {"stage": 3}}),
    "tensor ranks": (2, {"mesh": {"tensor": 2}}),
    "sequence parallelism": (2, {"mesh": {"tensor": 2}, "tensor_parallel": {"sequence": True}}),
    "inputs on the host": (
        2,
        {"zero_optimization": {"stage": 2}, "activation_checkpointing": {"cpu_checkpointing": True}},
    ),
}


def losses(name: str, layout: dict[str, Any], granularity: str) -> list[float]:
    torch.manual_seed(0)
    model = MODELS[name].build().train()
    recomputed = {"enabled": True, "granularity": granularity}
    settings = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        **layout,
        "activation_checkpointing": layout.get("activation_checkpointing", {}) | recomputed,
    }
    engine = zeromesh.initialize(model=model, config=settings)[0]
    found = []
    for step in range(2):
        ids = torch.randint(3, 90, (4, 8), generator=torch.Generator().manual_seed(step))
        ids = ids.chunk(engine.data_size)[engine.data_rank]
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        found += [float(loss), engine.get_global_grad_norm() or 0.0]
    engine.destroy()
    return found


@pytest.mark.some(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_it_trains_to_the_same_bits(name: str, layout: str) -> None:
    ranks, settings = LAYOUTS[layout]
    expected = run_ranks(losses, ranks, name, settings, "full")
    assert run_ranks(losses, ranks, name, settings, "selective") == expected


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.relu, self.down = nn.Linear(16, 32), nn.ReLU(inplace=True), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.relu(self.up(x)))


def gradients(granularity: str, backend: str | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    if granularity:
        checkpoint_modules(model, plan=GRANULARITIES[granularity])
    for block in model if backend else ():
        compile_forward(block, backend=backend)
    model(torch.randn(4, 16, generator=torch.Generator().manual_seed(1))).square().mean().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=pytest.mark.full)])
def test_a_result_that_is_changed_in_place_is_computed_again(backend: str | None) -> None:
    expected, found = gradients("", None), gradients("selective", backend)
    assert len(expected) == 12
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_products_are_computed_once_and_the_rest_twice() -> None:
    class Counting(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls: Counter[str] = Counter()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls[func._overloadpacket.__name__] += 1
            return func(*args, **(kwargs or {}))

    found = {}
    for granularity in ("", "selective", "full"):
        block = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        if granularity:
            checkpoint_modules([block], plan=GRANULARITIES[granularity])
        with Counting() as counting:
            block(torch.randn(4, 16)).square().mean().backward()
        found[granularity] = counting.calls["addmm"], counting.calls["gelu"]
    assert found[""] == (2, 1)
    assert found["selective"] == (2, 2)
    assert found["full"][0] > 2
