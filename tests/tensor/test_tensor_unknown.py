"""Modules of classes that nobody knows get the plan of an expert, and compute what one process computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeromesh
from compare import assert_close
from harness import on_ranks, run_ranks
from run import whole_state
from tensor_models import tensor_bytes
from test_tensor_rules import LIMIT, STEPS, batch, config
from unknown_modules import DECODERS, ROWS, Decoder, G, Model
from zeromesh.parallel.tensor.derive import derive
from zeromesh.parallel.tensor.tensor_plan import parse

# Modules whose ranks draw other numbers than one process; the same seeds give the same noise, though.
RANDOM = ("skipped at random", "dropout without an attribute")
TRAINED = [name for name in ROWS if name not in RANDOM]
FEW = ["minGPT", "Llama", "multi-query", "relative bias", "norm of all heads", "noise"]


def model_of(name: str) -> Model:
    torch.manual_seed(0)
    model = Model(ROWS[name])
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", ROWS)
def test_the_derived_plan_is_that_of_an_expert(name: str, ranks: int) -> None:
    row = ROWS[name]
    torch.manual_seed(0)
    plan, notes = derive(Model(row), ranks)
    found = {path: rule for path, rule in plan.items() if path.startswith("blocks.")}
    if ranks <= row.most:
        assert found == parse({f"blocks.*.{path}": rule for path, rule in row.plan.items()})
    gathers = [path for path, rule in found.items() if rule.style == G]
    alone = any(note.startswith("layers in classes that are not known") for note in notes)
    assert alone or all(any(note.startswith(path) for note in notes) for path in gathers if "*.*" not in path)


def trained(tensor: int, stage: int, names: Sequence[str], **options: Any) -> dict[str, Any]:
    found = {}
    for name in names:
        settings = config(tensor, stage, **options)
        engine = zeromesh.initialize(model=model_of(name).double(), config=settings)[0]
        losses = []
        for number in range(STEPS):
            torch.manual_seed(number)
            engine.backward(loss := engine(batch(number), batch(number)))
            engine.step()
            losses.append(loss.item())
        found[name] = losses, whole_state(engine.module)
        engine.destroy()
    return found


@pytest.mark.parametrize(
    ("tensor", "stage", "names"),
    [
        (2, 3, FEW),
        pytest.param(2, 1, TRAINED, marks=pytest.mark.full),
        pytest.param(4, 3, TRAINED, marks=pytest.mark.full),
    ],
    ids=["a few", "all on 2 ranks", "all on 4 ranks at stage 3"],
)
def test_training_is_that_of_one_process(tensor: int, stage: int, names: list[str]) -> None:
    expected = run_ranks(trained, 1, 1, 0, names, timeout=LIMIT)[0]
    for found in run_ranks(trained, tensor, tensor, stage, names, timeout=LIMIT):
        for name, (losses, state) in found.items():
            assert losses == pytest.approx(expected[name][0], rel=1e-9), name
            assert_close(state, expected[name][1], 1e-7)


def decoder(kind: str = "nanoGPT", **options: Any) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(*DECODERS[kind], **options)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def trained_decoder(kind: str, settings: dict[str, Any]) -> Any:
    micro = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    engine = zeromesh.initialize(model=decoder(kind).double(), config={**config(1), **micro, **settings})[0]

    def given(step: int) -> Iterator[Any]:
        for number in range(2):
            ids = batch(2 * step + number)[:2]
            yield {"tokens": ids, "positions": torch.arange(8).expand(2, -1), "labels": ids.roll(-1, 1)}

    losses = [float(engine.train_batch(given(step))) for step in range(STEPS)]
    report = engine.traffic_report()
    return losses, {name: value.clone() for name, value in engine.state_dict().items()}, report


SPREAD = {"tensor_parallel": {"sequence": True}}
MODES = {
    "sequence": {"mesh": {"tensor": 2}, **SPREAD},
    "recomputation": {"mesh": {"tensor": 2}, "activation_checkpointing": {"enabled": True}},
    "products kept": {
        "mesh": {"tensor": 2},
        "activation_checkpointing": {"enabled": True, "granularity": "selective"},
    },
    "inputs on the host": {
        "mesh": {"tensor": 2},
        "activation_checkpointing": {"enabled": True, "cpu_checkpointing": True},
    },
    "host": {"mesh": {"tensor": 2}, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
    "compiled": {"mesh": {"tensor": 2}, "compile": {"enabled": True, "backend": "aot_eager"}},
    "stages": {"mesh": {"tensor": 2, "pipeline": 2}},
    "stages and sequence": {"mesh": {"tensor": 2, "pipeline": 2}, **SPREAD},
    "context": {"mesh": {"tensor": 2, "context": 2}},
}


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("nanoGPT", "sequence"),
        *(
            pytest.param(kind, mode, marks=pytest.mark.full)
            for kind in DECODERS
            for mode in MODES
            # Context parallelism spreads torch's own attention only.
            if (kind, mode) != ("nanoGPT", "sequence") and (mode != "context" or kind == "nanoGPT")
        ),
    ],
)
def test_other_ways_to_spread_the_work_combine_with_it(kind: str, mode: str) -> None:
    settings = MODES[mode]
    expected = run_ranks(trained_decoder, 1, kind, {}, timeout=LIMIT)[0]
    for losses, state, _ in run_ranks(trained_decoder, prod(settings["mesh"].values()), kind, settings, timeout=LIMIT):
        assert losses == pytest.approx(expected[0], rel=1e-9)
        assert_close(state, expected[1], 1e-7)


class Chain(nn.Module):
    """Layers one after the other, each of which is a block of a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (32, 64, 48, 64, 32)
        layers = [(nn.Linear(one, other), nn.ReLU(inplace=True)) for one, other in pairwise(sizes)]
        self.layers = nn.Sequential(*(layer for pair in layers for layer in pair))

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        return (self.layers(x) - wanted).square().mean()


def trained_chain(settings: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    micro = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    engine = zeromesh.initialize(model=Chain().double(), config={**config(1), **micro, **settings})[0]

    def given(step: int) -> Iterator[Any]:
        for number in range(2):
            x = torch.randn(4, 32, generator=torch.Generator().manual_seed(2 * step + number), dtype=torch.float64)
            yield x[:2], x[2:]

    losses = [float(engine.train_batch(given(step))) for step in range(STEPS)]
    return losses, {name: value.clone() for name, value in engine.state_dict().items()}


@pytest.mark.full
@pytest.mark.parametrize("mesh", [{"tensor": 2}, {"tensor": 2, "pipeline": 2}, {"tensor": 4, "pipeline": 1}])
def test_chains_of_layers_are_split_also_between_stages(mesh: dict[str, int]) -> None:
    expected = run_ranks(trained_chain, 1, {}, timeout=LIMIT)[0]
    for losses, state in run_ranks(trained_chain, prod(mesh.values()), {"mesh": mesh}, timeout=LIMIT):
        assert losses == pytest.approx(expected[0], rel=1e-9)
        assert_close(state, expected[1], 1e-7)


@pytest.mark.parametrize(("kind", "tensor"), [("Llama", 2), pytest.param("nanoGPT", 4, marks=pytest.mark.full)])
@on_ranks("tensor", timeout=LIMIT)
def test_it_sends_what_an_experts_plan_sends(kind: str, tensor: int) -> None:
    reduced = 2 * 4 * 2 * 8 * 32 * 8
    sent = round(reduced * 2 * (tensor - 1) / tensor)
    paths = [path for path, m in decoder(kind).named_modules() if isinstance(m, nn.Linear) and path.startswith("h.")]
    plans = {"derived": {}, "whole": dict.fromkeys(paths, "replicate"), "apart": dict.fromkeys(paths, G)}
    mesh = {"mesh": {"tensor": tensor}}
    found = {
        name: tensor_bytes(trained_decoder(kind, mesh | {"tensor_parallel": {"plan": plan}})[2])
        for name, plan in plans.items()
    }
    assert found["derived"] - found["whole"] == STEPS * 2 * sent
    assert found["derived"] < found["apart"]
