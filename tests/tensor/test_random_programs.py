"""Models drawn at random train on ranks of the tensor axis as on one process."""

from __future__ import annotations

from typing import Any

import pytest

import zeromesh
from compare import assert_close
from harness import run_ranks
from random_programs import Program
from run import whole_state
from test_tensor_rules import batch, config

SGD = {"type": "SGD", "params": {"lr": 0.05}}
PROGRAMS, EACH = 400, 50


def trained(tensor: int, stage: int, seeds: range) -> dict[int, Any]:
    found: dict[int, Any] = {}
    for seed in seeds:
        settings = config(tensor, stage, optimizer=SGD)
        engine = zeromesh.initialize(model=Program(seed).double(), config=settings)[0]
        losses = []
        for number in range(2):
            engine.backward(loss := engine(batch(number), batch(number)))
            engine.step()
            losses.append(loss.item())
        found[seed] = losses, whole_state(engine.module)
        engine.destroy()
    return found


@pytest.mark.full
@pytest.mark.parametrize("first", range(0, PROGRAMS, EACH))
def test_a_program_trains_as_on_one_process(first: int) -> None:
    seeds, tensor = range(first, first + EACH), (4 if first % (4 * EACH) == 0 else 2)
    expected = run_ranks(trained, 1, 1, 0, seeds, timeout=600)[0]
    for found in run_ranks(trained, tensor, tensor, 3, seeds, timeout=600):
        for seed, (losses, state) in found.items():
            assert losses == pytest.approx(expected[seed][0], rel=1e-9), f"program {seed}"
            assert_close(state, expected[seed][1], 1e-7)
