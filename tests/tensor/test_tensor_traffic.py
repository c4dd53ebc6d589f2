"""What tensor parallelism sends: the report is the formula, and what the kernel counts on the wire is the report."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import run_ranks
from huggingface_models import GROUPED, SPECIAL
from run import adamw, start_engine, train_step
from tensor_models import tensor_bytes
from wire import sent_by_this_process

SAMPLES, LENGTH, WIDTH, LAYERS = 4, 64, 128, 3
ACTIVATION = SAMPLES * LENGTH * WIDTH * 4
STATISTICS = 3 * SAMPLES * LENGTH * 4
"""Bytes: of an activation, and of the three numbers for each token that ranks tell each other for the loss."""

LIMIT = 120


def llama() -> Any:
    import transformers

    torch.manual_seed(0)
    options = {"hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": LAYERS}
    options |= {"num_attention_heads": 4, "num_key_value_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**GROUPED, **SPECIAL, **options})).train()


def measured(settings: dict[str, Any], micro_batches: int = 1) -> tuple[dict[str, Any], int]:
    engine = start_engine(llama(), settings, micro=SAMPLES, accumulation=micro_batches, optimizer=adamw(1e-3))

    def update(step: int) -> None:
        for micro in range(micro_batches):
            generator = torch.Generator().manual_seed(step * micro_batches + micro)
            ids = torch.randint(3, 96, (SAMPLES, LENGTH), generator=generator)
            train_step(engine, engine(input_ids=ids, labels=ids).loss)

    update(0)
    dist.barrier()
    engine.traffic_report(reset=True)
    before = sent_by_this_process()
    update(1)
    return engine.traffic_report(), sent_by_this_process() - before


def all_reduce(size: int, ranks: int) -> int:
    return 2 * size * (ranks - 1) // ranks


@pytest.mark.parametrize(
    ("tensor", "micro_batches"), [(2, 2), *(pytest.param(*case, marks=pytest.mark.full) for case in ((2, 1), (4, 1)))]
)
def test_there_are_four_all_reduces_for_each_layer_and_micro_batch(tensor: int, micro_batches: int) -> None:
    # One for the embedding, one for the gradient of what the head reads; and the numbers for each token's loss.
    once = (4 * LAYERS + 2) * all_reduce(ACTIVATION, tensor) + (tensor - 1) * STATISTICS
    for report, _ in run_ranks(measured, tensor, {"mesh": {"tensor": tensor}}, micro_batches, timeout=LIMIT):
        assert tensor_bytes(report) == pytest.approx(once * micro_batches, rel=1e-4), report


@pytest.mark.parametrize("tensor", [2, pytest.param(4, marks=pytest.mark.full)])
def test_sequence_parallelism_sends_as_many_bytes(tensor: int) -> None:
    settings = {"mesh": {"tensor": tensor}, "tensor_parallel": {"sequence": True}}
    whole = (4 * LAYERS + 2) * all_reduce(ACTIVATION, tensor) + (tensor - 1) * STATISTICS
    # Where the sequence is spread its gradient is gathered, and after the last block the activation is; norms in
    # between have shares of their gradients.
    whole += all_reduce(ACTIVATION, tensor) + all_reduce(2 * LAYERS * WIDTH * 4, tensor)
    for report, _ in run_ranks(measured, tensor, settings, timeout=LIMIT):
        assert tensor_bytes(report) == pytest.approx(whole, rel=1e-4), report


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "settings",
    [
        {"mesh": {"tensor": 2}},
        {"mesh": {"tensor": 2}, "tensor_parallel": {"sequence": True}},
        {"mesh": {"tensor": 4}},
        {"mesh": {"tensor": 2}, "zero_optimization": {"stage": 3}},
    ],
    ids=["two ranks", "sequence", "four ranks", "sharded, and data parallel"],
)
def test_the_wire_carries_what_the_report_says(settings: dict[str, Any]) -> None:
    found = run_ranks(measured, 4 if "zero_optimization" in settings else settings["mesh"]["tensor"], settings)
    for report, wire in found:
        said = sum(row["bytes"] for row in report.values())
        assert tensor_bytes(report) > 10 * ACTIVATION
        assert said <= wire < 1.02 * said + 20_000, (said, wire, report)
