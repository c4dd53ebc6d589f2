"""Embedding tables in the planner: memory and messages are those that the engine reports, and not a dense layer's."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeromesh
from harness import run_ranks
from zeromesh import Settings
from zeromesh.apps.plan.choose.layout_documents import layout_from
from zeromesh.apps.plan.choose.search import search
from zeromesh.apps.plan.choose.space import PlanRequest
from zeromesh.apps.plan.cost.cost_trace import TracedCost
from zeromesh.apps.plan.cost.estimate import estimate
from zeromesh.apps.plan.cost.passes import TraceOptions
from zeromesh.apps.plan.machine.cluster import Machine
from zeromesh.apps.plan.machine.presets import cluster
from zeromesh.apps.plan.predict.rank_memory import memory_of
from zeromesh.apps.plan.predict.table_bytes import gradient_messages, lookup_bytes
from zeromesh.apps.plan.predict.time import time_of
from zeromesh.shard.sizes import Widths

ROWS, WIDTH, BAGS, SAMPLES = 64, 16, 4, 4


class Recommender(nn.Module):
    def __init__(self, rows: int = ROWS) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(rows, WIDTH, sparse=True, mode="sum", max_norm=9.0)])
        self.tables.append(nn.EmbeddingBag(rows // 2, WIDTH, sparse=True, mode="mean", padding_idx=1))
        self.head = nn.Linear(2 * WIDTH, 2, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = [table(ids % table.num_embeddings) for table in self.tables]
        return self.head(torch.cat(found, 1)).square().mean()


def cost_of(rows: int = ROWS, options: TraceOptions | None = None) -> TracedCost:
    inputs = {"ids": torch.zeros(SAMPLES, BAGS, dtype=torch.long)}
    with torch.device("meta"):
        model = Recommender(rows)
    return TracedCost(model, inputs, options or TraceOptions(kernels="cpu"))


def test_a_trace_counts_lookups_and_no_element_of_a_table() -> None:
    small, large = (cost_of(rows).at(SAMPLES, BAGS) for rows in (ROWS, 100 * ROWS))
    assert small.exact
    assert small.parameters == sum(p.numel() for p in Recommender().parameters())
    found = [table for unit in small.units for table in unit.tables]
    assert [(one.name, one.rows, one.lookups) for one in found] == [
        ("tables.0", ROWS, SAMPLES * BAGS),
        ("tables.1", ROWS // 2, SAMPLES * BAGS),
    ]
    assert [one.lookups for unit in cost_of().at(9, BAGS).units for one in unit.tables] == [9 * BAGS] * 2
    assert sum(unit.parameters.on() for unit in small.units) == 4 * WIDTH
    for one, other in zip(small.units, large.units, strict=True):
        assert one.backward_peak == other.backward_peak
        assert one.saved == other.saved
    none = cost_of(options=TraceOptions(kernels="cpu", tables=())).at(SAMPLES, BAGS)
    assert not any(unit.tables for unit in none.units)
    rough = estimate(Recommender(), "recommender", SAMPLES, BAGS, TraceOptions(), "untried")
    assert [one.name for unit in rough.units for one in unit.tables] == ["tables.0", "tables.1"]
    assert rough.parameters == small.parameters


CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "sgd": ("SGD", {}, 0),
    "adagrad": ("Adagrad", {}, 4),
    "adam": ("Adam", {}, 8),
    "one number per row": ("Adam", {"optimizer": {"type": "rowwise_adagrad"}}, 8),
    "host": ("Adagrad", {"device": "cpu"}, 4),
    "files": ("Adagrad", {"device": "nvme", "cache_rows": 7}, 4),
}
"""By name: the optimizer, the section of tables, and bytes of the states of other parameters' elements."""


def config_of(name: str, stage: int, folder: str) -> dict[str, Any]:
    optimizer, tables, _ = CASES[name]
    tables = {**tables, **({"nvme_path": folder} if name == "files" else {})}
    decay = {"weight_decay": 0.0} if optimizer == "Adam" else {}
    return {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": optimizer, "params": {"lr": 0.1, **decay}},
        "zero_optimization": {"stage": stage},
        "embedding_tables": tables,
    }


def reported(names: Sequence[str], stage: int, folder: str) -> list[tuple[dict[tuple[str, str], int], dict[str, Any]]]:
    found = []
    for name in names:
        engine = zeromesh.initialize(model=Recommender(), config=config_of(name, stage, folder))[0]
        engine.traffic_report(reset=True)
        for part in range(2):
            # All indices of a rank's update are others, and as many are each rank's.
            ids = torch.arange(SAMPLES * BAGS).view(SAMPLES, BAGS) * 2 + part
            engine.backward(engine(ids))
            engine.step()
        report, traffic = engine.memory_report(), engine.traffic_report()
        assert "tables" not in engine.sharded.units[0].name
        sizes = {(state, tier): size for state in ("parameter", "gradient", "optimizer", "slot")
                 for tier, size in report[state].items()}  # fmt: skip
        for flat in engine.sharded.flats:  # numbers of the steps
            for _, _, piece in flat.pieces:
                tier = "host" if flat.optimizer_tier.value == "nvme" else flat.optimizer_tier.value
                values = engine.optimizer.state.get(piece.parameter, {}).values()
                if numbers := sum(one.nbytes for one in values if isinstance(one, torch.Tensor) and not one.ndim):
                    sizes["optimizer", tier] -= numbers
        found.append(({key: size for key, size in sizes.items() if size}, traffic))
        engine.destroy()
    return found


def processor() -> Machine:
    machine = cluster(gpu="H100", gpus=2, nodes=1)
    nodes = tuple((replace(node, device=replace(node.device, processor=True)), n) for node, n in machine.nodes)
    return replace(machine, nodes=nodes)


@pytest.mark.parametrize("stage", [3, pytest.param(0, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full)])
def test_memory_and_messages_are_those_of_the_engine(stage: int, tmp_path: Path) -> None:
    runs = run_ranks(reported, 2, [*CASES], stage, str(tmp_path))
    for number, name in enumerate(CASES):
        layout, _ = layout_from(Settings.load(config_of(name, stage, str(tmp_path))), 2)
        layout = replace(layout, widths=Widths(4, 4, 4, 0, CASES[name][2]))
        (rank,) = memory_of(cost_of(), BAGS, layout, processor())
        sizes, _ = runs[0][number]
        foreseen = {key: size for key, size in rank.states.items() if size}
        assert sizes == foreseen, name
        tables = [table for unit in cost_of().at(SAMPLES, BAGS).units for table in unit.tables]
        sent = dict.fromkeys(("indices", "rows", "gradients"), 0.0)
        for table in tables:
            looked, summed = lookup_bytes(table, layout), gradient_messages(table, layout)
            for key in sent:
                sent[key] += layout.accumulation * getattr(looked, key) + getattr(summed, key)
        measured = {
            key: sum(run[number][1].get(f"table_{key}/data", {"bytes": 0})["bytes"] for run in runs) / 2
            for key in ("indices", "rows", "gradients")
        }
        # The second table has half of the rows, so that each row number comes twice in an update.
        assert measured == sent, name


def test_time_and_memory_of_a_large_table_follow_the_rows_used() -> None:
    machine = cluster(gpu="H100", gpus=8, nodes=1)
    layout, _ = layout_from(Settings.load(config_of("adagrad", 2, "")), 8)
    small, large = (time_of(cost_of(rows), BAGS, layout, machine).seconds for rows in (10**6, 10**8))
    assert small == pytest.approx(large, rel=0.2)
    dense = cost_of(10**8, TraceOptions(kernels="cpu", tables=()))
    assert time_of(dense, BAGS, layout, machine).seconds > 20 * large
    (spread,), (whole,) = (memory_of(one, BAGS, layout, machine) for one in (cost_of(10**8), dense))
    assert spread.peak.total < whole.peak.total / 4
    request = PlanRequest(cost_of(10**7), machine, 64, BAGS)
    assert search(request).best is not None
