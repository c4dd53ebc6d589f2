"""Ranks that train on the same samples, though each should have its own, are named once."""

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import zeromesh
from harness import run_ranks
from zeromesh.engine.first_batches import fingerprint


def train(seeds: Sequence[int], mesh: dict[str, int], steps: int, repeats: bool) -> list[str]:
    """Train three updates on batches by the seed of this rank's share; return the warnings."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zeromesh").addHandler(handler)
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": steps,
        "optimizer": {"type": "AdamW"},
        "mesh": mesh,
    }
    engine = zeromesh.initialize(model=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), config=config)[0]
    generator = torch.Generator().manual_seed(seeds[engine.data_rank])
    batch = torch.randn(2, 4, generator=generator)
    for _ in range(3 * steps):
        batch = batch if repeats else torch.randn(2, 4, generator=generator)
        engine.backward(engine(batch).square().mean())
        engine.step()
    logging.getLogger("zeromesh").removeHandler(handler)
    return messages


ROWS: dict[str, tuple[int, dict[str, Any], str]] = {
    "all alike": (2, {"seeds": (5, 5)}, "ranks 0-1 train on the same samples"),
    "one update of two micro-batches": (2, {"seeds": (5, 5), "steps": 2}, "ranks 0-1 train"),
    "each rank its own": (2, {"seeds": (5, 6)}, ""),
    "one batch again and again": (2, {"seeds": (5, 5), "repeats": True}, ""),
    "one share over tensor ranks": (2, {"seeds": (5,), "mesh": {"tensor": 2}}, ""),
    "the local rank in place of the rank": (4, {"seeds": (5, 6, 5, 6)}, "ranks 0, 2 and ranks 1, 3 train"),
    "shares of tensor ranks": (4, {"seeds": (5, 5), "mesh": {"data": 2, "tensor": 2}}, "ranks 0-3 train"),
}


@pytest.mark.some(2)
@pytest.mark.parametrize("row", ROWS)
def test_ranks_with_the_same_first_batches_are_named_once(row: str) -> None:
    ranks, arguments, expected = ROWS[row]
    first, *others = run_ranks(train, ranks, **{"mesh": {}, "steps": 1, "repeats": False, **arguments})
    assert not any(others)
    assert len(first) == bool(expected), first
    if expected:
        assert first[0].startswith(expected)
        assert "counts each sample 2 times; give each rank its own share" in first[0]


def test_a_fingerprint_depends_on_values_places_and_containers() -> None:
    device = torch.device("cpu")
    tokens, image = torch.arange(6).view(2, 3), torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    values: list[Any] = [
        tokens,
        tokens.flip(0),
        image,
        image + 1e-6,
        image.transpose(2, 3),
        {"x": [image], "y": tokens},
        {"x": [tokens], "y": image},
        torch.view_as_complex(image[..., :2].contiguous()),
        tokens > 2,
    ]
    numbers = [float(fingerprint(value, device)) for value in values]
    assert len(set(numbers)) == len(numbers)
    assert numbers == [float(fingerprint(value, device)) for value in values]
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided)
    no_arrays = (torch.empty(0), torch.empty(2, device="meta"), torch.empty(2, dtype=torch.uint4), nested)
    for nothing in (*no_arrays, tokens.to_sparse(), "text"):
        assert float(fingerprint(nothing, device)) == 0.0
