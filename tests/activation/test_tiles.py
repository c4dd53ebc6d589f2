"""Tiles over tokens: modules that treat tokens apart compute a few at a time, and the numbers are those of torch."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeromesh
from harness import run_ranks
from huggingface_models import MODELS
from zeromesh.parallel.activation.tiles import find_tiled, tile_modules

TOKENS = 3  # of a tile, which divide neither the 8 tokens of a sample nor the two samples of a rank


def losses(name: str, settings: dict[str, Any], tiling: dict[str, Any] | None) -> list[float]:
    torch.manual_seed(0)
    model = MODELS[name].build().double().train()
    if settings.get("lora"):
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    chosen = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        **{key: value for key, value in settings.items() if key != "lora"},
    }
    engine = zeromesh.initialize(model=model, config=chosen | ({"tiling": tiling} if tiling else {}))[0]
    found = []
    for step in range(4):
        ids = torch.randint(3, 90, (4, 8), generator=torch.Generator().manual_seed(step))
        ids = ids.chunk(engine.data_size)[engine.data_rank]
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        found += [float(loss), engine.get_global_grad_norm() or 0.0]
    engine.destroy()
    return found


TILING = {"mlp": TOKENS}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ZeRO-0": (1, {}),
    "ZeRO-1": (2, {"zero_optimization": {"stage": 1}}),
    "ZeRO-2": (2, {"zero_optimization": {"stage": 2}}),
    "ZeRO-3": (2, {"zero_optimization": {"stage": 3}}),
    "recomputed": (2, {"zero_optimization": {"stage": 3}, "activation_checkpointing": {"enabled": True}}),
    "selective": (1, {"activation_checkpointing": {"enabled": True, "granularity": "selective"}}),
    "tensor ranks": (2, {"mesh": {"tensor": 2}}),
    "sequence parallelism": (2, {"mesh": {"tensor": 2}, "tensor_parallel": {"sequence": True}}),
    "context ranks": (2, {"mesh": {"context": 2}}),
    "stages": (2, {"mesh": {"pipeline": 2}}),
    "adapters": (1, {"lora": True}),
    "adapters, ZeRO-3": (2, {"lora": True, "zero_optimization": {"stage": 3}}),
}


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_norms_are_those_without_tiles(layout: str) -> None:
    ranks, settings = LAYOUTS[layout]
    plain = run_ranks(losses, ranks, "llama", settings, None)
    # Sums over tokens are added up in another order.
    for tiled, expected in zip(run_ranks(losses, ranks, "llama", settings, TILING), plain, strict=True):
        assert tiled == pytest.approx(expected, rel=1e-9)
