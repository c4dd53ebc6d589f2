"""Frozen bases in few bits as the planner sees them: the states that the engine reports, and what is on the wire."""

import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import zeromesh
from harness import run_ranks
from zeromesh.apps.cli.plan_model import asked_model
from zeromesh.apps.plan.choose.layout_documents import layout_from
from zeromesh.apps.plan.choose.parallel_layout import ParallelLayout
from zeromesh.apps.plan.machine.presets import cluster
from zeromesh.apps.plan.machine.rates import Habits
from zeromesh.apps.plan.predict.durations import Durations
from zeromesh.apps.plan.predict.rank_memory import memory_of
from zeromesh.apps.train.model import language_model
from zeromesh.apps.train.train_settings import TrainSettings
from zeromesh.base.placement import ROWS
from zeromesh.comm.ordered_sums import SumPlace

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")

HIDDEN, WIDTH, LAYERS, WORDS, LENGTH = 256, 512, 3, 512, 16
NF4 = {"bits": 4, "type": "nf4"}
KINDS: dict[str, dict[str, Any] | None] = {
    "16 bits": None,
    "nf4 double": {**NF4, "double": True},
    "nf4": {**NF4, "double": False},
    "int8": {"bits": 8},
    "torchao 8": {"library": "torchao", "bits": 8},
    "torchao 4": {"library": "torchao", "bits": 4},
}
PADDING = 0.01  # of the states: each adapter begins at a multiple of 64 bytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=WORDS, max_position_embeddings=LENGTH, tie_word_embeddings=False,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def document(folder: Path, kind: str, stage: int = 3) -> dict[str, Any]:
    coded = {} if KINDS[kind] is None else {"quantization": KINDS[kind]}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "huggingface": {"path": str(folder), "sequence_length": LENGTH, **coded},
        "lora": {"r": 8, "target_modules": "all-linear"},
    }


def planned(folder: Path, kind: str) -> Any:
    file = folder / f"{kind}.json"
    file.write_text(json.dumps(document(folder, kind)))
    return asked_model(str(file), "bf16")


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("kind", "byte", "scales"),  # of an element; scales are on every rank
    [("16 bits", 2, 0), ("nf4 double", 0.5, 1 / 64 + 4 / 64 / 256), ("nf4", 0.5, 4 / 64), ("int8", 1, None)],
)
def test_frozen_weights_take_their_bits_and_adapters_alone_have_gradients(kind, byte, scales, folder) -> None:
    cost = planned(folder, kind).source.at(1, LENGTH)
    attention, key = HIDDEN * HIDDEN, HIDDEN * HIDDEN // 2
    linear = LAYERS * (2 * attention + 2 * key + 3 * HIDDEN * WIDTH)
    rest = 2 * WORDS * HIDDEN + (2 * LAYERS + 1) * HIDDEN
    rows = LAYERS * (2 * HIDDEN + HIDDEN + 2 * WIDTH + HIDDEN)  # of matrices, which share a scale in 8 bits
    adapters = 8 * LAYERS * (2 * 2 * HIDDEN + 2 * (HIDDEN + HIDDEN // 2) + 3 * (HIDDEN + WIDTH))
    assert sum(unit.parameters.on() for unit in cost.units) == adapters
    assert cost.parameters == linear + rest + adapters
    assert sum(unit.frozen.sharded.on() for unit in cost.units) == byte * linear + 2 * rest
    assert sum(unit.frozen.resident.on() for unit in cost.units) == 2 * HIDDEN  # the last norm; tables are units
    assert sum(unit.frozen.whole for unit in cost.units) == (4 * rows if scales is None else scales * linear)
    # Bytes of a unit on the wire are those of its frozen weights, too, where parameters are sharded; else of adapters.
    machine = cluster("h100", 2)
    for stage in (2, 3):
        durations = Durations(ParallelLayout(data=2, row=ROWS[stage]), machine, Habits())
        block = next(unit for unit in cost.units if unit.block)
        size = 2 * block.parameters.on() + (block.frozen.sharded.on() if stage == 3 else 0)
        found = next(unit for unit in durations.units(cost) if unit.block)
        assert found.gather == durations.shard.all_gather(size)


def test_quantized_blocks_are_planned_without_tensor_ranks(folder: Path) -> None:
    assert planned(folder, "nf4").limits.heads == 0
    assert planned(folder, "16 bits").limits.heads == 4


def reported(config: dict[str, Any]) -> tuple[dict[str, int], SumPlace]:
    """Return bytes by state, and where gradients were summed."""
    torch.manual_seed(0)
    settings = TrainSettings.load({**config, "train_batch_size": 2})
    engine = zeromesh.initialize(model=language_model(settings).build(), config=config)[0]
    tokens = torch.zeros(1, LENGTH, dtype=torch.long)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    report, sums = engine.memory_report(), engine.mesh.shard.sums
    engine.destroy()
    states = ("parameter", "gradient", "optimizer", "slot", "buffer")
    return {state: sum(report[state].values()) for state in states}, sums


@cache
def all_reported(folder: Path, kind: str) -> list[tuple[dict[str, int], SumPlace]]:
    return [run_ranks(reported, 2, document(folder, kind, stage), timeout=120)[0] for stage in range(4)]


@pytest.mark.full
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("kind", list(KINDS))
def test_planned_states_are_those_that_the_engine_reports(kind: str, stage: int, folder: Path) -> None:
    library = (KINDS[kind] or {}).get("library", "bitsandbytes")
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    reported_states, sums = all_reported(folder, kind)[stage]
    found = dict(reported_states)
    layout, _ = layout_from(TrainSettings.load(document(folder, kind, stage)), 2)
    (rank,) = memory_of(planned(folder, kind).source, LENGTH, layout, cluster("h100", 2), sums=sums)
    foreseen = {state: size for (state, tier), size in rank.states.items() if tier == "device"}
    # The table of rotary positions is not a parameter.
    found["buffer"] -= 4 * (HIDDEN // 4 // 2) * 2 if found["buffer"] else 0
    assert sum(foreseen.values()) == pytest.approx(sum(found.values()), rel=PADDING), (foreseen, found)
