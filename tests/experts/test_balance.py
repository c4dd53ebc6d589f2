"""Load of experts, the selection bias, z-loss and the auxiliary loss of the global batch, beside one plain process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeromesh
from compare import assert_close
from harness import on_ranks
from run import configuration, sgd, start_engine, whole_parameters

EXPERTS, TOP_K, LAYERS, RATE = 4, 2, 2, 0.01

SIZES = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 16,
    "num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
    "n_routed_experts": EXPERTS, "num_local_experts": EXPERTS, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
OF_FAMILY: dict[str, dict[str, Any]] = {
    "afmoe": {"num_dense_layers": 0, "num_shared_experts": 1, "layer_types": ["full_attention"] * LAYERS},
    "deepseek_v3": {"n_group": 2, "topk_group": 2, "first_k_dense_replace": 0, "kv_lora_rank": 8, "q_lora_rank": 8,
                    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
}  # fmt: skip


def mixture(family: str, dtype: torch.dtype = torch.float64, **more: Any) -> Any:
    """Return a tiny model of a family whose routers have an uneven selection bias, if they have one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **SIZES | OF_FAMILY.get(family, {}) | more)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    for number, bias in enumerate(biases_of(model).values()):
        with torch.no_grad():
            bias.copy_(torch.arange(EXPERTS) * 0.001 * (-1) ** number)
    return model


def biases_of(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = (*model.named_buffers(), *model.named_parameters())
    return {name: tensor for name, tensor in tensors if name.endswith(("correction_bias", "expert_bias"))}


def micro_batch(number: int, rows: int = 2, padding: int = 3) -> dict[str, torch.Tensor]:
    """Return a micro-batch whose first row begins with padding."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(1, 64, (rows, 8), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, :padding] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


class Plain:
    """One process in plain torch: its choices are counted, and its biases moved as the paper says."""

    def __init__(self, model: Any) -> None:
        self.model, self.optimizer = model, torch.optim.SGD(model.parameters(), lr=0.1)
        self.mask = torch.ones(0)
        self.counts: dict[str, torch.Tensor] = {}
        for name, module in model.named_modules():
            if name.endswith(".experts"):
                self.counts[name] = torch.zeros(EXPERTS, dtype=torch.float64)
                module.register_forward_pre_hook(lambda module, args, name=name: self.count(name, args[1]))

    def count(self, name: str, chosen: torch.Tensor) -> None:
        present = chosen[self.mask.view(-1) != 0]
        self.counts[name] += torch.bincount(present.view(-1), minlength=EXPERTS)

    def update(self, batches: list[dict[str, torch.Tensor]]) -> float:
        losses = []
        for batch in batches:
            self.mask = batch["attention_mask"]
            loss = self.model(**batch).loss
            (loss / len(batches)).backward()
            losses.append(loss.item())
        self.optimizer.step()
        self.optimizer.zero_grad()
        for counts, bias in zip(self.counts.values(), biases_of(self.model).values(), strict=True):
            change = RATE * torch.sign(counts.mean() - counts)
            with torch.no_grad():
                bias += (change - change.mean()).to(bias.dtype)
            counts.zero_()
        return sum(losses) / len(losses)


def engine_of(model: Any, stage: int = 0, **rest: Any) -> Any:
    sections = {"micro": 2, "stage": stage, "optimizer": sgd(0.1), "experts": {"bias_update_rate": RATE}}
    return start_engine(model, **sections | rest)


def train(engine: Any, batches: list[dict[str, torch.Tensor]]) -> float:
    for batch in batches:
        engine.backward(engine(**batch).loss)
        engine.step()
    return float(engine.get_mean_loss())


def compare(family: str, stage: int, **rest: Any) -> None:
    """Compare three updates of engines on two ranks with those of one process."""
    plain, engine = Plain(mixture(family)), engine_of(mixture(family), stage, accumulation=2, **rest)
    rank = engine.data_rank
    for step in range(3):
        each = [[micro_batch(100 * step + 10 * r + m) for m in range(2)] for r in range(engine.data_size)]
        expected = plain.update([batch for batches in each for batch in batches])
        assert train(engine, each[rank]) == pytest.approx(expected, abs=1e-9)
        engine.eval()
        with torch.no_grad():
            engine(**micro_batch(999 + rank))  # is not counted
        engine.train()
    assert_close(whole_parameters(engine.module), dict(plain.model.named_parameters()), 1e-9, 1e-9)
    expected = biases_of(plain.model)
    found = {**whole_parameters(engine.module), **dict(engine.module.named_buffers())}
    for name, bias in expected.items():
        torch.testing.assert_close(found[name], bias, rtol=0, atol=1e-9)
        assert bias.abs().max() > RATE  # it has moved


@on_ranks(2)
def test_a_bias_in_a_buffer_moves_as_in_one_process() -> None:
    compare("minimax_m2", 0)
    compare("minimax_m2", 3, activation_checkpointing={"enabled": True})


@on_ranks(2)
def test_a_bias_in_a_frozen_parameter_moves_as_in_one_process() -> None:
    compare("afmoe", 1)
    compare("afmoe", 3)
