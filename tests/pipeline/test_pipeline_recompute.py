"""Stages that keep only what they are given, and compute their activations again."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import zeromesh
from harness import run_ranks
from run import configuration, sgd
from test_pipeline import CHUNKS, STEPS, cross_entropy, train
from zeromesh.parallel.activation.choices import add_router

LIMIT = 240
MICROBATCHES = 8


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("kind", "layout", "schedule", "further"),
    [
        ("tied", {"pipeline": 4}, "1f1b", {}),
        ("dataclass", {"pipeline": 2, "data": 2, "row": 3}, "zb-v", {}),
        ("llama", {"pipeline": 2, "tensor": 2, "row": 1}, "zb-h1", {"activation_checkpointing": {"enabled": True}}),
        pytest.param("t5", {"pipeline": 2, "row": 2}, "interleaved-1f1b", {}, marks=pytest.mark.full),
    ],
)
def test_recomputed_stages_train_to_the_numbers_of_one_process(kind, layout, schedule, further) -> None:
    expected, values, _, _ = run_ranks(train, 1, kind, timeout=LIMIT, further=further)[0]
    chosen = {"schedule": schedule, "chunks": CHUNKS.get(schedule), "recompute": True}
    ranks = layout["pipeline"] * layout.get("data", 1) * layout.get("tensor", 1)
    limit = 1e-9 if kind in ("tied", "dataclass") else 1e-5  # transformers compute losses in fp32
    for found, whole, *_ in run_ranks(
        train, ranks, kind, timeout=LIMIT, schedule=schedule, further={**further, "pipeline": chosen}, **layout
    ):
        assert found == pytest.approx(expected, rel=limit, abs=limit)
        for name, value in whole.items():
            assert float((value - values[name]).abs().max()) <= 10 * limit, name


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = spectral_norm(nn.Linear(8, 8)), nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))
        self.router, self.seen = nn.Linear(8, 4), set()
        add_router(self)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        # A second decision for the same input chooses others.
        scores, key = self.router(x), float(x.detach().sum())
        index = (scores + torch.arange(4) * (key in self.seen)).topk(2).indices
        self.seen.add(key)
        x = x * scores.gather(-1, index).sum(-1, keepdim=True).sigmoid()
        # The graph must see the count and the estimate of the norm as they were in this micro-batch.
        return x + self.dropout(self.norm(self.linear(x)).relu()) * (1 + 0.1 * self.calls)


def run(recompute: bool) -> tuple[list[float], dict[str, Tensor], tuple[int, ...]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), *(Noisy() for _ in range(4)), nn.Linear(8, 4)).double()
    settings = configuration(
        batch=4 * MICROBATCHES, micro=4, optimizer=sgd(0.1), mesh={"pipeline": 2}, pipeline={"recompute": recompute}
    )
    engine = zeromesh.initialize(model=model, config=settings, loss_fn=cross_entropy)[0]
    torch.manual_seed(7)

    def given(step: int) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(step)
        for _ in range(MICROBATCHES):
            x = torch.randn(4, 8, generator=generator, dtype=torch.float64)
            yield x, torch.randint(4, (4,), generator=generator)

    losses = [float(engine.train_batch(given(step))) for step in range(STEPS)]
    engine.pipelined.record()
    losses.append(float(engine.train_batch(given(STEPS))))
    return losses, engine.gathered_state_dict(), engine.pipelined.recorded.held


def test_recomputation_draws_the_same_numbers_chooses_the_same_changes_buffers_once_and_holds_one_graph() -> None:
    losses, state, held = run_ranks(run, 2, False)[0]
    again, other, less = run_ranks(run, 2, True)[0]
    assert again == losses
    for name, value in state.items():
        torch.testing.assert_close(other[name], value, rtol=0, atol=0)
    assert (held, less) == ((2, 1), (1, 1))
