"""Ranks that share experts together with each other axis and feature, beside one plain process."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import zeromesh
from harness import run_ranks
from run import configuration, sgd
from zeromesh.apps.verify.plain_training import wide

RATE, CLIP, STEPS, MICRO_BATCHES, LIMIT = 0.1, 0.3, 3, 4, 300
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 4,
    "shared_expert_intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 4, "num_experts": 8,
    "num_experts_per_tok": 2, "norm_topk_prob": True, "mlp_only_layers": [0], "decoder_sparse_step": 1,
}  # fmt: skip

Numbers = list[tuple[float, float]]
"""Loss and norm of the gradient of each update."""


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


HOST = {"device": "cpu"}
RECOMPUTE: dict[str, Any] = {"activation_checkpointing": {"enabled": True}}
FEATURES: dict[str, dict[str, Any]] = {
    **{f"row {stage}": zero(stage) for stage in range(4)},
    "host 2": zero(2, offload_optimizer=HOST),
    "host 3": zero(3, offload_optimizer=HOST, offload_param=HOST),
    "slots": {**zero(3), "slots": {"parameter": 3}},
    "tensor": {"mesh": {"tensor": 2}},
    "sequence": {"mesh": {"tensor": 2}, "tensor_parallel": {"sequence": True}},
    "context": {"mesh": {"context": 2}},
    "replicate": {"mesh": {"replicate": 2}},
    "accumulation": {"accumulates": True},
    "recompute": RECOMPUTE,
    "selective": {"activation_checkpointing": {"enabled": True, "granularity": "selective"}},
    "inputs on the host": {"activation_checkpointing": {"enabled": True, "cpu_checkpointing": True}},
    "transformers' checkpoints": {"transformers": True},
    "compile": {"compile": {"enabled": True, "backend": "aot_eager"}},
    "clipping": {"gradient_clipping": CLIP},
    "grouped": {"grouped": True},  # products of transformers, which have no kernel for float64
    **{
        schedule: {"mesh": {"pipeline": 2}, "pipeline": {"schedule": schedule}}
        for schedule in ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v")
    },
    "pipeline, recompute": {"mesh": {"pipeline": 2}, "pipeline": {"schedule": "1f1b", "recompute": True}},
}
"""Parts of the configuration by the name of a feature. All that are named together hold."""

TRIPLES = [
    "tensor+row 3", "context+row 3", "replicate+row 2", "zb-v+row 2", "zb-h1+tensor", "1f1b+context", "zb-v+recompute",
    "tensor+recompute", "context+recompute", "compile+recompute", "compile+row 3", "host 2+clipping", "tensor+clipping",
    "tensor+context", "sequence+selective", "accumulation+row 2", "interleaved-1f1b+clipping", "host 3+recompute",
    "zb-h1+host 2", "row 3+transformers' checkpoints", "slots+recompute", "tensor+accumulation", "grouped+row 3",
    "grouped+recompute", "grouped+tensor", "grouped+zb-v", "grouped+selective+row 2", "grouped+host 3",
]  # fmt: skip
CASES = [*FEATURES, *TRIPLES]
SAMPLES = ("tensor+row 3", "zb-v+recompute")


def merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    both = {
        key: merged(first[key], second[key]) for key in first.keys() & second.keys() if isinstance(first[key], dict)
    }
    return {**first, **second, **both}


def build(shares: bool, grouped: bool) -> nn.Module:
    """Return a model whose experts include one of all tokens; others where sequences are spread, which it cannot do."""
    torch.manual_seed(0)
    make, kind = (Qwen2MoeConfig, Qwen2MoeForCausalLM) if shares else (Qwen3MoeConfig, Qwen3MoeForCausalLM)
    config = make(**SIZES, experts_implementation="grouped_mm" if grouped else "eager", tie_word_embeddings=False)
    model: nn.Module = kind(config).to(torch.float32 if grouped else torch.float64).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)  # at 0.02, routers and gates would hardly matter
    return model


def micro_batches(step: int) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(96, (MICRO_BATCHES, 12 + 4 * (step % 2)), generator=torch.Generator().manual_seed(step))
    return [{"input_ids": row[None], "labels": row[None]} for row in ids]


@cache
def plain(clips: bool, shares: bool, grouped: bool) -> tuple[Numbers, list[dict[str, torch.Tensor]]]:
    """Return the numbers of updates in plain torch, and the parameters after each."""
    model = build(shares, grouped)
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
    numbers, states = [], []
    for step in range(STEPS):
        losses = []
        for batch in micro_batches(step):
            with wide():
                loss = model(**batch, use_cache=False).loss
                (loss / MICRO_BATCHES).backward()
            losses.append(loss.item())
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = float(nn.utils.get_total_norm(gradients))
        for gradient in gradients if clips else ():
            gradient.mul_(min(1.0, CLIP / (norm + 1e-6)))
        optimizer.step()
        optimizer.zero_grad()
        numbers.append((sum(losses) / MICRO_BATCHES, norm))
        states.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return numbers, states


def train(config: dict[str, Any]) -> tuple[int, Numbers, list[dict[str, torch.Tensor]], int]:
    """Return this rank's share of the batch, its numbers, whole parameters, and the graphs compiled after an update."""
    config = {**config}
    model: Any = build(config["mesh"].get("context", 1) == 1, config.pop("grouped", False))
    accumulates, transformers = config.pop("accumulates", False), config.pop("transformers", False)
    if transformers:
        model.activation_checkpointing_enable()
    settings = configuration(batch=MICRO_BATCHES, micro=1, optimizer=sgd(RATE, momentum=0.9), **config)
    engine = zeromesh.initialize(model=model, config=settings)[0]
    each = MICRO_BATCHES // engine.data_size
    assert each > 1 or not accumulates
    numbers, states, graphs = [], [], []
    for step in range(STEPS):
        mine = micro_batches(step)[engine.data_rank * each : (engine.data_rank + 1) * each]
        numbers.append((updated(engine, mine), engine.get_global_grad_norm()))
        states.append({name: value.clone() for name, value in (engine.gathered_state_dict() or {}).items()})
        graphs.append(torch._dynamo.utils.counters["stats"].get("unique_graphs", 0))
    share = engine.data_rank
    engine.destroy()
    return share, numbers, states, graphs[-1] - graphs[1]


def updated(engine: Any, batches: list[dict[str, torch.Tensor]]) -> float:
    """Make an update; return the mean loss of the batches."""
    with wide():
        if engine.pipelined is not None:
            return float(engine.train_batch(iter(batches)))
        losses = []
        for batch in batches:
            loss = engine(**batch, use_cache=False).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in SAMPLES else pytest.mark.full) for case in CASES]
)
def test_losses_norms_gradients_and_parameters_are_those_of_one_process(case: str) -> None:
    config: dict[str, Any] = {"mesh": {"expert": 2}}
    for name in case.split("+"):
        config = merged(config, FEATURES[name])
    ranks = 2
    for axis in ("pipeline", "replicate"):
        ranks *= config["mesh"].get(axis, 1)
    shared = config["mesh"].get("tensor", 1) * config["mesh"].get("context", 1)
    ranks = max(ranks, shared * (ranks // 2), 4 if shared > 1 and "row" in case else 0)
    grouped = "grouped" in config
    tolerance = 1e-5 if grouped else 1e-9
    expected, states = plain("gradient_clipping" in config, config["mesh"].get("context", 1) == 1, grouped)
    by_rank = run_ranks(train, ranks, config, timeout=LIMIT)
    shares = {share: numbers for share, numbers, *_ in by_rank}
    for step, (loss, norm) in enumerate(expected):
        losses = [numbers[step][0] for numbers in shares.values()]
        assert sum(losses) / len(losses) == pytest.approx(loss, rel=tolerance)
        for numbers in shares.values():
            assert numbers[step][1] == pytest.approx(norm, rel=tolerance)
    found = next(states for _, _, states, _ in by_rank if states[0])
    # What the first update has changed is the gradient times the rate.
    for after, whole in zip(found, states, strict=True):
        assert whole.keys() <= after.keys()
        for name, value in whole.items():
            torch.testing.assert_close(after[name], value, rtol=0, atol=tolerance, msg=f"{name} of {case}")
    assert by_rank[0][3] == 0, "blocks are compiled anew for other numbers of rows"
