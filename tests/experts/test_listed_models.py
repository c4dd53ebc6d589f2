"""Models whose experts are lists, stacked, or get sorted rows, trained by engines that share them."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import run
from harness import on_ranks, run_ranks
from test_lists import WIDTH, Around, Loop, Mixture

STEPS = 3


class Model(nn.Module):
    """Blocks of one kind with what goes past them: float tokens (samples, length, width) -> loss."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        makes = {"loop": Loop, "mixture": Mixture}
        self.first = nn.Linear(WIDTH, WIDTH)
        self.kind = kind
        self.blocks = nn.ModuleList(
            makes[kind]() if kind in makes else Around(kind, more=kind == "sorted") for _ in range(2)
        )
        self.head = nn.Linear(WIDTH + {"mixture": 2, "sorted": 1}.get(kind, 0), 3)

    def forward(self, x: Tensor) -> Tensor:
        x, auxiliary = self.first(x), 0.0
        for number, block in enumerate(self.blocks):
            y = block(x) if self.kind in ("loop", "mixture") else block(x.flatten(0, 1)).view(*x.shape[:2], -1)
            if isinstance(y, tuple):
                y, extra = y
                auxiliary = auxiliary + extra["logits"].square().mean()
            x = y if number else x + y[..., :WIDTH]
        return self.head(x).square().mean() + 0.1 * auxiliary


T5 = {
    "vocab_size": 40, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 2,
    "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 4, "expert_capacity": 6,
    "dropout_rate": 0.0, "router_jitter_noise": 0.0, "decoder_start_token_id": 0,
}  # fmt: skip
NLLB = {
    "vocab_size": 40, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "encoder_sparse_step": 2,
    "decoder_sparse_step": 2, "num_experts": 4, "expert_capacity": 64, "dropout": 0.0, "attention_dropout": 0.0,
    "activation_dropout": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "moe_token_dropout": 0.0,
    "second_expert_policy": "all", "max_position_embeddings": 32, "pad_token_id": 1,
}  # fmt: skip
JET = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_key_value_heads": 2,
    "kv_channels": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 32,
}  # fmt: skip
LLAMA = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "intermediate_size_mlp": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "num_local_experts": 4,
    "num_experts_per_tok": 1, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "switch": ("SwitchTransformersConfig", "SwitchTransformersForConditionalGeneration", T5),
    "nllb": ("NllbMoeConfig", "NllbMoeForConditionalGeneration", NLLB),
    "jetmoe": ("JetMoeConfig", "JetMoeForCausalLM", JET),
    "llama4": ("Llama4TextConfig", "Llama4ForCausalLM", LLAMA),
}


def build(name: str) -> Any:
    torch.manual_seed(0)
    if name not in FAMILIES:
        return Model(name).double()
    import transformers

    config, kind, settings = FAMILIES[name]
    made = getattr(transformers, config)(**settings)
    made._attn_implementation = "eager"
    model = getattr(transformers, kind)(made).double()
    for module in model.modules():
        if "Router" in type(module).__name__ and hasattr(module, "dtype"):
            module.dtype = torch.float64  # which configurations do not allow
    return model


def batch(name: str, step: int, share: int) -> Any:
    generator = torch.Generator().manual_seed(100 * step + share)
    if name not in FAMILIES:
        return torch.randn(2, 5, WIDTH, generator=generator, dtype=torch.float64)
    return torch.randint(2, 40, (2, 6), generator=generator)


def loss_of(model: Any, name: str, given: Any) -> Tensor:
    if name not in FAMILIES:
        return model(given)
    return model(input_ids=given, labels=given).loss


def plain(name: str, shares: int) -> tuple[list[float], dict[str, Tensor]]:
    model = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for share in range(shares):
            torch.manual_seed(7)
            loss = loss_of(model, name, batch(name, step, share)) / shares
            loss.backward()
            losses.append(loss.item() * shares)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return losses, {key: p.detach() for key, p in model.named_parameters()}


def check(name: str, stage: int, mesh: dict[str, int], **sections: Any) -> None:
    model = build(name)
    engine = run.start_engine(
        model,
        optimizer=run.adamw(1e-2),
        stage=stage,
        clipping=0.5,
        micro=2,
        mesh=mesh,
        data_types={"grad_accum_dtype": "fp32"} if False else {},
        **sections,
    )
    losses = []
    for step in range(STEPS):
        torch.manual_seed(7)
        loss = loss_of(engine, name, batch(name, step, engine.data_rank))
        losses.append(run.train_step(engine, loss))
    parameters = run.whole_parameters(model)
    expected_losses, expected = plain(name, engine.data_size)
    mine = expected_losses[engine.data_rank :: engine.data_size]
    torch.testing.assert_close(losses, mine, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(parameters, expected, rtol=1e-9, atol=1e-9)


QUICK = ("loop", "flat", "sorted", "switch")
NAMES = ["loop", "mixture", "flat", "three", "sorted", *FAMILIES]


def slow(name: str, *others: Any) -> Any:
    return pytest.param(name, *others, marks=() if name in QUICK else pytest.mark.full)


@pytest.mark.parametrize("name", [slow(name) for name in NAMES])
@on_ranks(2)
def test_training_is_that_of_one_process(name: str) -> None:
    check(name, 3, {"expert": 2})


RECOMPUTED = {"activation_checkpointing": {"enabled": True}}
LAYOUTS: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {
    "whole states": (0, {"expert": 2}, {}),
    "recomputation": (1, {"expert": 2}, RECOMPUTED),
    "expert data": (2, {"data": 4, "expert": 2}, {}),
    "tensor lines": (1, {"data": 1, "tensor": 2, "expert": 2}, {}),
    "tensor and data": (3, {"data": 2, "tensor": 2, "expert": 4}, {}),
    "replicas": (3, {"replicate": 2, "data": 2, "expert": 2}, RECOMPUTED),
    "one expert each": (3, {"data": 4, "expert": 4}, {"accumulation": 1}),
}


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_training_is_that_of_one_process_in_other_layouts(name: str, layout: str) -> None:
    stage, mesh, sections = LAYOUTS[layout]
    if name == "mixture" and "tensor" in mesh:
        pytest.skip("calls with three dims are refused where tensor ranks share the rows")
    run_ranks(
        check,
        prod(size for axis, size in mesh.items() if axis != "expert") if "data" in mesh else 2,
        name,
        stage,
        mesh,
        **sections,
    )
