"""Models of transformers can be planned for without memory: all causal ones, and published sizes."""

from typing import Any

import pytest
import torch
import transformers

import causal_models
from zeromesh.apps.plan.cost.cost_trace import TracedCost
from zeromesh.apps.plan.cost.passes import TraceOptions
from zeromesh.apps.plan.cost.source import hugging_face_cost, token_inputs

NO_BLOCKS = ("zamba2",)  # its layers share parameters, so that nothing is a unit of its own

LLAMA: dict[str, Any] = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
# Configurations as published, and the parameters that are published with them: of the model cards on the Hugging Face
# hub, whose checkpoints have so many elements.
PUBLISHED: dict[str, tuple[Any, int]] = {
    "Llama-3-8B": (
        transformers.LlamaConfig(**LLAMA, intermediate_size=14336, num_key_value_heads=8, vocab_size=128256),
        8_030_261_248,
    ),
    "Mistral-7B": (
        transformers.MistralConfig(**LLAMA, intermediate_size=14336, num_key_value_heads=8, vocab_size=32000),
        7_241_732_096,
    ),
    "Qwen2.5-7B": (
        transformers.Qwen2Config(
            hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
            num_key_value_heads=4, vocab_size=152064,
        ),
        7_615_616_512,
    ),
    "GPT-J-6B": (
        transformers.GPTJConfig(n_embd=4096, n_layer=28, n_head=16, rotary_dim=64, vocab_size=50400),
        6_050_882_784,
    ),
    "GPT-2 XL": (transformers.GPT2Config(n_embd=1600, n_layer=48, n_head=25), 1_557_611_200),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", [n for n in causal_models.names() if n not in causal_models.IMPOSSIBLE])
def test_every_causal_model_is_traced(name: str) -> None:
    source = hugging_face_cost(causal_models.configuration(name))
    if name in causal_models.UNLABELLED:  # whose labels are no text
        source = TracedCost(source.model, token_inputs(labels=None))
    cost = source.at(2, 8)
    assert cost.exact, cost.note
    assert cost.parameters == sum(parameter.numel() for parameter in source.model.parameters())
    assert name in NO_BLOCKS or any(unit.block for unit in cost.units)
    assert cost.flops > 0


@pytest.mark.full
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_parameters_and_operations(name: str) -> None:
    config, parameters = PUBLISHED[name]
    sequence, samples = 1024, 2
    cost = hugging_face_cost(config, TraceOptions(dtype=torch.bfloat16)).at(samples, sequence)
    assert cost.exact
    assert cost.parameters == parameters
    # 6 P + 6 L h s for each token, or 12 where attention computes what a mask leaves out, without what is looked up,
    # added or multiplied element by element: tables, biases and norms.
    source = hugging_face_cost(config)
    model = getattr(source, "complete", source).model
    matrices = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear) or hasattr(m, "nf"))
    products = 12 if config.model_type == "gptj" else 6  # which has no fused attention
    attention = products * config.num_hidden_layers * config.hidden_size * sequence
    assert cost.flops == (6 * matrices + attention) * sequence * samples
