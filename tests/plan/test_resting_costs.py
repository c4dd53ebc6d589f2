"""Experts that rest in the planner: memory is what the engine reports, and traffic is the sum of what it moves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import zeromesh
from run import configuration, train_step
from zeromesh import Settings
from zeromesh.apps.plan.choose.judge import judge
from zeromesh.apps.plan.choose.layout_documents import layout_from
from zeromesh.apps.plan.choose.resting_experts import resting_update
from zeromesh.apps.plan.choose.search import search
from zeromesh.apps.plan.choose.space import PlanRequest
from zeromesh.apps.plan.cost.cost import Recompute
from zeromesh.apps.plan.cost.models import shape_named
from zeromesh.apps.plan.cost.resting import RestingCost
from zeromesh.apps.plan.cost.shape import TransformerCost
from zeromesh.apps.plan.cost.source import hugging_face_cost
from zeromesh.apps.plan.machine.presets import cluster
from zeromesh.apps.plan.machine.rates import Habits
from zeromesh.apps.plan.predict.durations import Durations
from zeromesh.apps.plan.predict.rank_memory import memory_of
from zeromesh.apps.plan.predict.table_bytes import expert_traffic

WORDS, LAYERS, EXPERTS, HIDDEN, INNER = 128, 3, 8, 32, 64
NUMBERS = LAYERS * EXPERTS * 3 * HIDDEN * INNER
"""Elements of all experts."""


def mixture(sizes: str) -> TransformerCost:
    """Return the cost of a mixture by its formula."""
    shape = shape_named(f"llama:{sizes}")
    assert shape is not None
    return TransformerCost(shape)


def thirty_billion() -> TransformerCost:
    """Return the cost of a mixture of the sizes of Qwen3-30B-A3B."""
    heads = "heads=32,kv_heads=4,head_width=128,vocabulary=151936"
    return mixture(f"layers=48,hidden=2048,{heads},experts=128,chosen=8,expert_width=768")


def config_of(rest: str, folder: Path, stage: int = 0, **sections: Any) -> dict[str, Any]:
    experts = {"rest": rest, "nvme_path": str(folder), "slots": 3}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    made: dict[str, Any] = configuration(optimizer, stage, True, micro=1, experts=experts, **sections)
    return made


def mixtral() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.MixtralConfig(
        vocab_size=WORDS,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        architectures=["MixtralForCausalLM"],
    )


@pytest.mark.parametrize(
    ("rest", "stage"),
    [("nvme", 0), *(pytest.param(*case, marks=pytest.mark.full) for case in (("cpu", 0), ("cpu", 3)))],
)
def test_planned_states_are_those_that_the_engine_reports(rest: str, stage: int, tmp_path: Path) -> None:
    config = config_of(rest, tmp_path, stage)
    source = hugging_face_cost(mixtral())
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    engine = zeromesh.initialize(model=AutoModelForCausalLM.from_config(mixtral()), config=config)[0]
    tokens = torch.arange(16).view(1, 16)
    train_step(engine, engine(input_ids=tokens, labels=tokens).loss)
    report = engine.memory_report()
    steps: dict[str, int] = {"device": 0, "host": 0}  # numbers of the steps are not in the plan
    for flat in engine.sharded.flats:
        for _, _, piece in flat.pieces:
            values = engine.optimizer.state.get(piece.parameter, {}).values()
            tier = "device" if flat.optimizer_tier.value == "device" else "host"
            steps[tier] += sum(v.nbytes for v in values if isinstance(v, torch.Tensor) and not v.ndim)
    engine.destroy()
    layout, _ = layout_from(Settings.load(config), 1)
    (rank,) = memory_of(RestingCost(source, 2), 16, layout)
    for state in ("parameter", "optimizer", "slot"):
        for tier, size in report[state].items():
            expected = size - (steps.get(tier, 0) if state == "optimizer" else 0)
            assert rank.states.get((state, tier), 0) == expected, (state, tier)
    at_rest = "host" if rest == "cpu" else rest
    assert sum(size for (_, tier), size in rank.states.items() if tier == at_rest) >= 12 * NUMBERS
    assert rank.states["gradient", "host"] == 4 * NUMBERS  # two choices of 16 tokens: all experts


def test_traffic_is_that_of_the_experts_that_tokens_choose(tmp_path: Path) -> None:
    """Bytes of one expert's element: 4 + 2 of a fetch, 8 of its gradient on the host, 24 of the update."""
    source = RestingCost(mixture("layers=3,hidden=32,heads=4,experts=8,chosen=2,expert_width=64"), 2)
    layout, _ = layout_from(Settings.load(config_of("nvme", tmp_path)), 1)
    one, some, all_of_them = (resting_update(source, length, layout) for length in (1, 2, 64))
    assert (one.at_rest, all_of_them.at_rest) == (12 * NUMBERS, 12 * NUMBERS)
    assert all_of_them.moved.host == (6 + 8 + 24) * NUMBERS
    assert (one.moved.host / all_of_them.moved.host, some.moved.host / all_of_them.moved.host) == (
        2 / EXPERTS,
        4 / EXPERTS,
    )
    away = (EXPERTS - 3) / EXPERTS  # 3 of 8 are in slots
    assert all_of_them.moved.reads == pytest.approx(away * (12 + 4) * NUMBERS)
    assert all_of_them.moved.writes == pytest.approx(away * 12 * NUMBERS)
    for policy in (Recompute.BLOCKS, Recompute.PRODUCTS, Recompute.PLANNED):
        again = replace(layout, recompute=policy)
        assert resting_update(source, 64, again).moved.host == (2 * 6 + 8 + 24) * NUMBERS


def test_thirty_billion_parameters_on_one_card_and_a_disk_that_is_slow(tmp_path: Path) -> None:
    """A mixture of 30.5 G parameters, 3.3 G of them active: experts of 29.0 G, 12 bytes each."""
    experts = 29.0e9
    config = config_of("nvme", tmp_path, activation_checkpointing={"enabled": True})
    layout, _ = layout_from(Settings.load(config), 1)
    model = thirty_billion()
    source = RestingCost(model, 2)
    update = resting_update(source, 4096, layout)
    assert update.at_rest == pytest.approx(12 * experts, rel=2e-3)
    # Without fetches, and with gradients in 16 bits on the host, it is 28 bytes: 850 GB of all parameters.
    assert update.moved.host - (4 + 2 * 6) * experts == pytest.approx(28 * experts, rel=2e-3)
    machine = cluster("h100", 1)
    judgement = judge(PlanRequest(source, machine, 1, 4096, resting=layout.resting), layout)
    said = " ".join(judgement.sentences)
    assert "Experts of a rank take 348 GB of files. An update moves 1.28 TB in host memory" in said
    assert "The disk is slow for this plan" in said
    assert "at 6.50 GB/s read and 3.50 GB/s written" in said
    assert 'or 348 GB of host memory on each node with experts.rest = "cpu"' in said
    assert judgement.fits
    plain = judge(PlanRequest(model, machine, 1, 4096), replace(layout, resting=None))
    assert not plain.fits
    assert "Experts of a rank" not in " ".join(plain.sentences)


def test_a_step_waits_for_what_computation_does_not_hide(tmp_path: Path) -> None:
    config = config_of("cpu", tmp_path, activation_checkpointing={"enabled": True})
    layout, source = layout_from(Settings.load(config), 1)[0], RestingCost(thirty_billion(), 2)

    def waits(gpu: str, length: int) -> tuple[float, float, float]:
        units = Durations(layout, cluster(gpu, 1), Habits()).units(source.at(1, length, 1))
        return sum(unit.rows for unit in units), sum(unit.rows_again for unit in units), units[1].rows_update

    node = cluster("h100", 1).nodes[0][0]
    (host, link, _), (landed, _, _) = (
        moved.seconds(node, 1)
        for moved in expert_traffic(next(u for u in source.at(1, 512, 1).units if u.tables).tables[0], layout)
    )
    few, many = waits("h100", 512), waits("h100", 1 << 20)
    assert few[2] == many[2] == pytest.approx(landed)
    assert 0.9 * 48 * (max(host, link) + landed) < few[0] < 48 * (max(host, link) + landed)
    assert 0.9 * 48 * max(host, link) < few[1] < 48 * max(host, link)
    assert many[:2] == (0.0, 0.0)  # a million tokens hide all of it


@pytest.mark.full
def test_a_search_places_experts_that_rest_on_data_ranks_alone() -> None:
    layout, _ = layout_from(Settings.load(config_of("cpu", Path("unused"))), 1)
    source = RestingCost(thirty_billion(), 2)
    request = PlanRequest(source, cluster("h100", 1, host_memory=2e12), 8, 2048, resting=layout.resting)
    best = search(request).best
    assert best is not None
    assert best.layout.resting == layout.resting
    assert {best.layout.tensor, best.layout.context, best.layout.pipeline, best.layout.expert} == {1}
