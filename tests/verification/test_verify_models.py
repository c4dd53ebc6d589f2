"""Layouts that train as one process does are found equal, for models of many kinds."""

from typing import Any

import pytest
import torch

from harness import run_ranks
from verifying import of_model, of_net, of_tables
from zeromesh.apps.verify.plain_training import PlainStep, _bounds

FAMILIES = ("gpt2", "llama", "qwen2", "opt", "phi3", "bert", "vit", "t5", "mixtral", "net")
OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ZeRO-3": {"zero_optimization": {"stage": 3}},
    "ZeRO-2 in bf16, states on the host": {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": True},
    },
    "tensor 2": {"mesh": {"tensor": 2}},
    "fp16, recomputation": {"fp16": {"enabled": True}, "activation_checkpointing": {"enabled": True}},
}  # fmt: skip
CASES = [
    (family, layout)
    for family in FAMILIES
    for layout in LAYOUTS
    if (family, layout) != ("net", "tensor 2")  # convolutions are not split
]


def outcome(family: str, layout: str) -> tuple[str, str, float]:
    config = {
        "optimizer": OPTIMIZER, "gradient_clipping": 0.5, "gradient_accumulation_steps": 2,
        "train_micro_batch_size_per_gpu": 1 if family != "net" else 2, **LAYOUTS[layout],
    }  # fmt: skip
    report = (of_net if family == "net" else of_model)(family, config)
    return report.verdict.name, report.sentence, report.seconds


@pytest.mark.some(1)
@pytest.mark.parametrize(("family", "layout"), CASES)
def test_a_right_layout_is_equal(family: str, layout: str) -> None:
    verdict, sentence, _ = run_ranks(outcome, 2, family, layout)[0]
    assert verdict == "EQUAL", sentence


TABLES: dict[str, Any] = {
    "adagrad": {"optimizer": {"type": "Adagrad", "params": {"lr": 1e-2}}},
    "sparse adam, bf16": {"optimizer": {"type": "Adam", "params": {"lr": 1e-2}}, "bf16": {"enabled": True}},
    "rowwise, scheduled": {
        "embedding_tables": {"optimizer": {"type": "rowwise_adagrad", "params": {"lr": 1e-2}}},
        "scheduler": {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}},
    },
    "host": {"optimizer": {"type": "SGD", "params": {"lr": 1e-2}}, "embedding_tables": {"device": "cpu"}},
}


@pytest.mark.some(1)
@pytest.mark.parametrize("case", TABLES)
def test_embedding_tables_are_equal(case: str) -> None:
    given = {"optimizer": OPTIMIZER, "gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 2}
    report = run_ranks(of_tables, 2, "", {**given, **TABLES[case]})[0]
    assert report.equal, report.sentence


def test_a_value_may_be_rounded_to_the_number_beside_it() -> None:
    step = PlainStep({"loss/0.0": torch.tensor(4.5)})
    numbers = torch.finfo(torch.bfloat16)
    bound = _bounds(step, [step, step], numbers.eps / 2, {})["loss/0.0"]
    assert numbers.eps * 4 <= bound < numbers.eps * 16


@pytest.mark.full
@pytest.mark.parametrize("family", ["t5", "bert"])
def test_rounding_of_split_layers_is_no_difference(family: str) -> None:
    given = {"optimizer": OPTIMIZER, "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}}
    report = run_ranks(of_model, 2, family, {**given, "mesh": {"tensor": 2}})[0]
    assert report.equal, report.sentence


@pytest.mark.full
@pytest.mark.parametrize(
    "config",
    [
        {"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}},
        {"bf16": {"enabled": True}, "float8": {"enabled": True, "recipe": "rowwise"}},
        {"bf16": {"enabled": True}, "float8": {"enabled": True}, "zero_optimization": {"stage": 3}},
        {"mesh": {"tensor": 2}, "tensor_parallel": {"sequence": True}},
        {"mesh": {"pipeline": 2}},
        {"mesh": {"context": 2}},
        {"mesh": {"replicate": 2, "data": 1}, "zero_optimization": {"stage": 3}},
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/elsewhere"}}},
        {"torch_autocast": {"enabled": True, "dtype": "bf16"}},
        {"bf16": {"enabled": True}, "optimizer_state_dtype": "bf16", "zero_optimization": {"stage": 3}},
    ],
    ids=str,
)
def test_other_axes_and_tiers_are_equal(config: dict[str, Any]) -> None:
    given = {"optimizer": OPTIMIZER, "gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 1}
    report = run_ranks(of_model, 2, "llama", {**given, **config})[0]
    assert report.equal, report.sentence
