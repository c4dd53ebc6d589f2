"""Selective recomputation: results of products stay, the rest is computed again, and nothing else changes."""

from typing import Any

import pytest
import torch

import zeromesh
from harness import run_ranks
from huggingface_models import MODELS

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


@pytest.mark.some(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_it_trains_to_the_same_bits(name: str, layout: str) -> None:
    ranks, settings = LAYOUTS[layout]
    expected = run_ranks(losses, ranks, name, settings, "full")
    assert run_ranks(losses, ranks, name, settings, "selective") == expected
