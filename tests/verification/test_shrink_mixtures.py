"""Smaller mixtures keep what the ranks of the expert axis do: several experts each, groups, dense and shared layers."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, Glm4MoeLiteConfig, Qwen3MoeConfig

from zeromesh.apps.verify.shrink import subject_of

SIZES = {"replicate": 1, "data": 4, "pipeline": 1, "context": 1, "tensor": 1, "expert": 4}
SHAPE: dict[str, Any] = {"vocab_size": 200, "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 8}


def smaller(config: Any, expert: int = 4) -> Any:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return subject_of(model, None, SIZES | {"expert": expert}, 2, False).model


def test_groups_of_experts_and_dense_first_layers_stay() -> None:
    config = DeepseekV3Config(
        **SHAPE, num_hidden_layers=6, first_k_dense_replace=3, n_routed_experts=256, n_group=8, topk_group=4,
        num_experts_per_tok=8, moe_intermediate_size=64, intermediate_size=64, q_lora_rank=16, kv_lora_rank=16,
    )  # fmt: skip
    model = smaller(config)
    small = model.config
    assert (small.n_routed_experts, small.n_group, small.topk_group, small.num_experts_per_tok) == (16, 2, 1, 2)
    assert [type(layer.mlp).__name__ for layer in model.model.layers] == ["DeepseekV3MLP", "DeepseekV3MoE"]
    assert model.model.layers[1].mlp.shared_experts is not None


@pytest.mark.parametrize(("expert", "experts"), [(1, 4), (2, 4), (3, 128), (8, 16)])
def test_each_rank_has_several_experts_where_the_ranks_divide_them(expert: int, experts: int) -> None:
    config = Qwen3MoeConfig(
        **SHAPE, num_hidden_layers=4, num_experts=128, mlp_only_layers=[0, 1], decoder_sparse_step=1
    )
    model = smaller(config, expert)
    assert model.config.num_experts == experts
    kinds = [type(layer.mlp).__name__ for layer in model.model.layers]
    assert kinds == ["Qwen3MoeMLP", "Qwen3MoeSparseMoeBlock"]


def test_layers_of_each_kind_stay() -> None:
    kinds = ["dense"] * 3 + ["sparse"] * 3
    config = Glm4MoeLiteConfig(**SHAPE, num_hidden_layers=6, mlp_layer_types=kinds, n_routed_experts=16)
    assert smaller(config).config.mlp_layer_types == ["dense", "sparse"]
