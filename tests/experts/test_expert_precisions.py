"""Experts that ranks share in each precision: as near to plain torch in fp32 as that precision is."""

from functools import cache
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import zeromesh
from harness import run_ranks
from run import configuration, sgd, whole_parameters

STEPS, RATE = 3, 0.1
PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": True},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}
BOUNDS = {"bf16": 2.0**-7, "fp16": 2.0**-10, "autocast": 2.0**-7}
"""Rounding of one value; of losses and norms, relative, and of what the parameters have moved."""


def build() -> Any:
    """Return a model in which each token goes to all experts: by rounding, it would choose others."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=96,
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=8,
        tie_word_embeddings=False,
    )
    model = Qwen3MoeForCausalLM(config).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)
    return model


def batch(step: int) -> torch.Tensor:
    return torch.randint(96, (4, 12), generator=torch.Generator().manual_seed(step))


def train(config: dict[str, Any]) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    engine = zeromesh.initialize(model=build(), config=config)[0]
    losses, norms = [], []
    for step in range(STEPS):
        mine = batch(step).chunk(engine.data_size)[engine.data_rank]
        loss = engine(input_ids=mine, labels=mine, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
    parameters = whole_parameters(engine.module)
    engine.destroy()
    return losses, norms, parameters


@cache
def plain() -> tuple[list[float], list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model = build()
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(input_ids=batch(step), labels=batch(step), use_cache=False).loss
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, {name: parameter.detach() for name, parameter in model.named_parameters()}, start


@pytest.mark.full
@pytest.mark.parametrize("row", [1, 3])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_results_are_as_near_to_those_of_fp32_as_the_precision_is(precision: str, row: int) -> None:
    config = configuration(
        optimizer=sgd(RATE), stage=row, micro=2, clipping=1e9, mesh={"expert": 2}, **PRECISIONS[precision]
    )
    ranks = run_ranks(train, 2, config, timeout=200)
    losses, norms, parameters, start = plain()
    bound = BOUNDS[precision]
    for step in range(STEPS):
        assert sum(run[0][step] for run in ranks) / 2 == pytest.approx(losses[step], rel=bound)
        for run in ranks:
            assert run[1][step] == pytest.approx(norms[step], rel=bound)
    for name, expected in parameters.items():
        moved, difference = expected - start[name], ranks[0][2][name].float() - expected
        # The parameters themselves are read in the precision that they are computed in.
        limit = 8 * bound * moved.norm() + bound * expected.norm()
        assert float(difference.norm()) < float(limit), name
