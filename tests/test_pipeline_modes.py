"""What changes while a pipeline trains: what is frozen, and whether there are graphs; and what must not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import zeromesh
from harness import run_ranks

WIDTH, SAMPLES, MICROBATCHES = 8, 2, 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        for layer in self.layers:
            h = layer(h).tanh()
        return (h - y).pow(2).mean()


KINDS: dict[str, type[nn.Module]] = {"plain": Model}


def start(kind: str, pipeline: int, row: int = 0, schedule: str = "1f1b") -> zeromesh.Engine:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "train_batch_size": SAMPLES * MICROBATCHES,
        "train_micro_batch_size_per_gpu": SAMPLES,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": row},
        "mesh": {"pipeline": pipeline},
        "pipeline": {"schedule": schedule, "chunks": 2 if schedule == "interleaved-1f1b" else None},
    }
    return zeromesh.initialize(model=KINDS[kind]().double(), config=settings)[0]


def given(step: int, samples: int = SAMPLES) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    for _ in range(MICROBATCHES):
        x, y = torch.randn(2, samples, WIDTH, generator=generator, dtype=torch.float64)
        yield 3 * x + 1, y


def evaluate() -> list[int]:
    """How many forwards are taken for such that a backward may follow, before and after evaluations."""
    engine = start("plain", 2, row=3)
    order = engine.sharded.events.order
    engine.train_batch(given(0))
    found = [order.current.number, len(order.forward)]
    engine.eval_batch(given(1))
    engine.eval_batch(given(1, 3 * SAMPLES))
    return [*found, order.current.number, len(order.forward)]


def test_an_evaluation_fetches_the_same_whether_or_not_its_shapes_are_new() -> None:
    """Ranks of one stage may have seen different ones, and must fetch the same."""
    for before, waiting, after, left in run_ranks(evaluate, 2):
        assert (after, left) == (before, waiting) == (MICROBATCHES, 0)
