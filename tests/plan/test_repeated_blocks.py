"""Costs of a model with a stack of like blocks: a few that are traced give those of a trace of all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from zeromesh.apps.plan.cost.cost_trace import TracedCost
from zeromesh.apps.plan.cost.passes import TraceOptions
from zeromesh.apps.plan.cost.repeated_blocks import RepeatedCost, RepeatedStack
from zeromesh.apps.plan.cost.source import class_of, hugging_face_cost, inputs_by_size

transformers = pytest.importorskip("transformers")

OPTIONS = TraceOptions(torch.bfloat16)
LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 9,
    "vocab_size": 64,
}
# Type of model, configuration, and blocks that are traced: where all weights are trained, and with adapters.
KINDS: dict[str, tuple[str, dict[str, Any], tuple[int, int]]] = {
    "llama": ("llama", LLAMA, (3, 4)),
    "kinds in turn": ("gemma2", LLAMA | {"head_dim": 16, "sliding_window": 8}, (7, 7)),
    "first blocks unlike": (
        "deepseek_v3",
        LLAMA
        | {
            "num_key_value_heads": 4,
            "first_k_dense_replace": 2,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
        },
        (5, 5),
    ),
}


def adapted(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    adapters: nn.Module = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["o_proj"]))
    return adapters


@pytest.mark.full
@pytest.mark.parametrize("adapts", [False, True], ids=["all weights", "adapters"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_the_costs_are_those_of_all_blocks(kind: str, adapts: bool) -> None:
    model_type, facts, traced = KINDS[kind]
    config = transformers.AutoConfig.for_model(model_type, **facts)
    config.use_cache = False
    adapt = adapted if adapts else lambda model: model
    cost = hugging_face_cost(config, OPTIONS, adapt=adapt)
    assert isinstance(cost, RepeatedCost)
    assert cost.stack.traced == traced[adapts]

    def make() -> nn.Module:
        with torch.device("meta"):
            return adapt(class_of(config)(config))

    complete = TracedCost(make, inputs_by_size(class_of(config), config), OPTIONS)
    for samples in (1, 4):
        assert cost.at(samples, 32).units == complete.at(samples, 32).units


def test_blocks_stand_for_others_of_their_kind() -> None:
    stack = RepeatedStack("layers", depth=12, begin=1, period=2)
    assert stack.traced == 8
    order = [*stack.order]
    assert order == [0, 1, 2, 3, 4, 3, 4, 3, 4, 5, 6, 7]
    assert len(order) == stack.depth
    assert all((old - 1) % 2 == (new - 1) % 2 for new, old in enumerate(order) if new)


def test_a_short_model_is_traced_as_it_is() -> None:
    config = transformers.LlamaConfig(**(LLAMA | {"num_hidden_layers": 3}))
    assert isinstance(hugging_face_cost(config, OPTIONS), TracedCost)
