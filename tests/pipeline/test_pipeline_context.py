"""Models that are cut into stages, and whose sequences are spread over ranks, train to the numbers of one process."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import zeromesh
from harness import run_ranks
from test_pipeline import ADAMW, CHUNKS, hugging_face
from zeromesh.apps.train.architectures.decoder import Decoder
from zeromesh.apps.train.train_settings import ModelShape

LIMIT = 240
SAMPLES, MICROBATCHES, VOCABULARY = 2, 4, 48


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind != "decoder":
        return hugging_face(kind).double()
    shape = ModelShape(
        architecture="llama", vocab_size=VOCABULARY, hidden_size=32, layers=8, heads=4, sequence_length=16
    )
    return Decoder(shape).double()


def batches(kind: str, step: int, rank: int, size: int) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(step)
    for number in range(MICROBATCHES):
        # Of two ranks, or four, each has chunks of the begin and of the end; shapes differ from step to step.
        length = 8 + 8 * ((step + number) % 2)
        ids = torch.randint(0, VOCABULARY, (SAMPLES, length), generator=generator).chunk(size)[rank]
        labels = ids.clone()
        labels[:, : number + 2] = -100  # fewer on the ranks that have the begin
        yield {"tokens" if kind == "decoder" else "input_ids": ids, "labels": labels}


def train(kind: str, mesh: dict[str, int], schedule: str, row: int, strategy: str) -> tuple[list[float], Any]:
    settings = {
        "train_batch_size": SAMPLES * MICROBATCHES,
        "train_micro_batch_size_per_gpu": SAMPLES // mesh.get("data", 1),
        "optimizer": ADAMW,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": row},
        "mesh": mesh,
        "context_parallel": {"strategy": strategy},
        "pipeline": {"schedule": schedule, "chunks": CHUNKS.get(schedule)} if mesh.get("pipeline") else {},
    }
    engine = zeromesh.initialize(model=build(kind), config=settings)[0]

    def given(step: int) -> Iterator[Any]:
        return batches(kind, step, engine.data_rank, engine.data_size)

    found = [float(engine.eval_batch(given(100)))]
    for step in range(2):
        found += [float(engine.train_batch(given(step))), engine.get_global_grad_norm()]
    with engine.sharded.gathered(engine.sharded.units):
        return found, {name: one.detach().clone() for name, one in engine.module.named_parameters()}


CASES = [
    ("llama", {}, "1f1b", 0, "ring"),
    ("decoder", {}, "zb-v", 3, "ulysses"),
    pytest.param("gpt2", {"data": 2}, "zb-h1", 3, "ring", marks=pytest.mark.full),
    pytest.param("llama", {"tensor": 2}, "interleaved-1f1b", 2, "ulysses", marks=pytest.mark.full),
]


@pytest.mark.some(1)
@pytest.mark.parametrize(("kind", "others", "schedule", "row", "strategy"), CASES)
def test_stages_with_sequences_spread_over_ranks(kind, others, schedule, row, strategy) -> None:
    expected, values = run_ranks(train, 1, kind, {}, "1f1b", 0, strategy, timeout=LIMIT)[0]
    mesh = {"pipeline": 2, "context": 2, **others}
    ranks = 4 * max(1, *others.values(), 1)
    seen = set()
    for found, whole in run_ranks(train, ranks, kind, mesh, schedule, row, strategy, timeout=LIMIT):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)  # transformers compute losses in fp32
        for name, value in whole.items():
            seen.add(name)
            assert float((value - values[name]).abs().max()) <= 1e-4, name
    assert seen == set(values)
