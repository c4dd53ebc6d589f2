"""States of a model whose experts are shared by ranks: what the planner and the report foresee is what is allocated."""

from typing import Any

import pytest
import torch

import zeromesh
from harness import on_ranks
from run import configuration, train_step
from zeromesh import Settings
from zeromesh.apps.plan.choose.layout_documents import layout_from
from zeromesh.apps.plan.cost.source import hugging_face_cost
from zeromesh.apps.plan.predict.rank_memory import memory_of
from zeromesh.base.placement import ROWS
from zeromesh.engine import reports
from zeromesh.shard import sizes

WORDS = 128
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


def mixtral() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.MixtralConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        architectures=["MixtralForCausalLM"],
    )


def config_of(stage: int, steps: int, expert: int) -> dict[str, Any]:
    base = configuration(micro=1, accumulation=steps, zero={"stage": stage}, bf16=True, units=["MixtralDecoderLayer"])
    return base | ADAMW | {"mesh": {"expert": expert}}


def allocated(config: dict[str, Any]) -> tuple[dict[tuple[str, str], int], dict[tuple[str, str], float], Any]:
    """Return the bytes of states that the engine has, those that its report plans, and where gradients are summed."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    engine = zeromesh.initialize(model=AutoModelForCausalLM.from_config(mixtral()), config=config)[0]
    for _ in range(config["gradient_accumulation_steps"]):
        train_step(engine, engine(torch.arange(16).view(1, 16)))
    report = engine.memory_report()
    found = {
        (state, tier): size
        for state in ("parameter", "gradient", "optimizer", "slot")
        for tier, size in report[state].items()
        if size
    }
    # Numbers of steps are not in the plan.
    for parameter in engine.optimizer.state:
        values = engine.optimizer.state[parameter].values()
        found["optimizer", "device"] -= sum(v.nbytes for v in values if isinstance(v, torch.Tensor) and not v.ndim)
    layout = sizes.StateLayout(row=ROWS[config["zero_optimization"]["stage"]])
    planned = reports.planned_states(engine.sharded, layout, sizes.TableLayout())
    sums = engine.mesh.shard.sums
    engine.destroy()
    return found, planned, sums


def check(ranks: int, expert: int, stage: int, steps: int) -> None:
    config = config_of(stage, steps, expert)
    found, planned, sums = allocated(config)
    layout, _ = layout_from(Settings.load(config), ranks)
    assert layout.expert == expert
    (rank,) = memory_of(hugging_face_cost(mixtral()), 16, layout, sums=sums)
    foreseen = {key: size for key, size in rank.states.items() if size and key[0] != "buffer"}
    assert found == foreseen, (stage, steps)
    assert found == planned, (stage, steps)


@on_ranks(2)
def test_states_of_shared_experts() -> None:
    check(2, 2, 3, 1)
    check(2, 2, 1, 2)


@pytest.mark.full
@on_ranks(4)
def test_states_of_experts_shared_by_some_ranks() -> None:
    for stage in ROWS:
        for steps in (1, 3):
            check(4, 2, stage, steps)
